//! Events: what an operator must know.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How much an event matters.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Nothing has to be done.
    Info,
    /// Something may go wrong.
    Warning,
    /// Something is wrong.
    Error,
}

/// An event. One that happens again replaces the one before it, with a number of its own and a
/// higher `count`; then nobody has acknowledged it yet.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Its number; later events have higher ones.
    pub id: u64,
    /// What has happened, as a word: see `docs/user/events.md`.
    pub kind: String,
    /// How much it matters.
    pub severity: Severity,
    /// The volume; absent if it concerns the server.
    #[serde(default)]
    pub volume: Option<String>,
    /// What has happened, with the values.
    pub text: String,
    /// What to do; empty if there is nothing to do.
    #[serde(default)]
    pub remedy: String,
    /// When it happened first, in seconds since 1970.
    pub first_unix_seconds: u64,
    /// When it happened last, in seconds since 1970.
    pub last_unix_seconds: u64,
    /// How often it has happened.
    pub count: u64,
    /// Who has acknowledged it, and when, in seconds since 1970.
    #[serde(default)]
    pub acknowledged: BTreeMap<String, u64>,
}

/// The remembered events.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct EventList {
    /// Oldest first.
    pub events: Vec<Event>,
}

/// The body of an acknowledgement.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Acknowledgement {
    /// Who acknowledges: a person or a program.
    pub by: String,
}

/// Somebody has acknowledged an event.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Acknowledged {
    /// The event's number.
    pub id: u64,
    /// Who.
    pub by: String,
}
