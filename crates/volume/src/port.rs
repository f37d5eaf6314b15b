//! The way from a router to the shards.

use forebay_engine::Request;

/// Carries requests to shards: a mailbox to another thread, the engine of the own thread, or the
/// simulator's world. Requests for one shard arrive there in the order in which they were taken.
/// Each is answered by exactly one [`forebay_engine::Reply`], handed to [`crate::Router::reply`]
/// later, never from within `submit`.
pub trait ShardPort {
    /// Takes a request for a shard.
    ///
    /// # Errors
    /// Gives the request back when that shard can take no more now; the router keeps it and
    /// tries again in [`crate::Router::pump`].
    fn submit(&mut self, shard: usize, request: Request) -> Result<(), Request>;
}
