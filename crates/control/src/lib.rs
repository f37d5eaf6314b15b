//! Everything outside the data path: configuration, the HTTP API on a Unix socket with its client,
//! and the metrics. The pool is accessed through [`PoolControl`], which the owner of the shard
//! threads implements; client requests never pass through here.

#![forbid(unsafe_code)]

pub mod access;
pub mod api;
mod client;
pub mod config;
pub mod endpoint;
mod error;
pub mod events;
mod job;
mod metrics;
mod monitor;
mod peer;
mod pool;
mod problems;
mod server;
pub mod settings;
mod socket;
pub mod statistics;
pub mod text;
pub mod units;

pub use client::{Client, ClientError, Followed};
pub use error::{ControlError, ControlErrorKind};
pub use metrics::{exposed_name, exposition};
pub use monitor::Monitor;
pub use peer::ChangesBy;
pub use pool::{
    Application, ClientSnapshot, DiskSnapshot, Keeper, Latency, LeftSnapshot, PoolControl,
    PoolSnapshot, PrefetchSnapshot, PrefetchTarget, PrimaryHealth, SettingSnapshot, ShardSnapshot,
    TraceSnapshot, TraceTarget, UpgradeSnapshot, UpgradeState, VolumeSnapshot, Wanted,
};
pub use server::web::{Token, WebServer, WebSocket};
pub use server::{ControlSocket, Server};
pub use socket::{SocketError, default_socket};
