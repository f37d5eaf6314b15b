//! The interface from a router to the shards.

use forebay_engine::Request;

/// Carries requests to shards: through a mailbox to another thread, directly to the engine of the
/// same thread, or into the simulator's world. Requests for one shard arrive in the order in which
/// they were submitted. Each is answered by exactly one [`forebay_engine::Reply`], handed to
/// [`crate::Router::reply`] later, never from within `submit`.
pub trait ShardPort {
    /// Takes a request for a shard.
    ///
    /// # Errors
    /// Gives the request back when that shard can take no more now; the router keeps it and tries
    /// again in [`crate::Router::pump`].
    fn submit(&mut self, shard: usize, request: Request) -> Result<(), Request>;
}
