//! The clients as a table.

use super::{duration, time};
use crate::api::ClientStatus;
use crate::units::Size;

/// The clients of sockets, and what each has done so far.
#[must_use]
pub fn clients(all: &[ClientStatus]) -> String {
    if all.is_empty() {
        return "no clients of sockets; disks of this machine are in `forebay status`\n".to_owned();
    }
    let width = |of: fn(&ClientStatus) -> &str, least: usize| {
        all.iter().map(|client| of(client).len()).max().unwrap_or(0).max(least)
    };
    let (peers, volumes) = (width(|one| &one.peer, 6), width(volume, 6));
    let mut out = format!(
        "{:peers$}  {:volumes$}  {:>9}  {:>9}  {:>10}  {:>10}  {:>9}  {:>9}  {:>10}  {:>10}  \
         {:>6}\n",
        "CLIENT",
        "VOLUME",
        "CONNECTED",
        "SILENT",
        "READS",
        "WRITES",
        "READ",
        "WRITTEN",
        "READ MEAN",
        "WRITE MEAN",
        "ERRORS"
    );
    for client in all {
        let of = |name: &str| client.operations.iter().find(|one| one.operation == name);
        let count = |name| of(name).map_or(0, |one| one.requests);
        let mean = |name| of(name).and_then(|one| one.mean_micros).map_or("-".to_owned(), time);
        out += &format!(
            "{:peers$}  {:volumes$}  {:>9}  {:>9}  {:>10}  {:>10}  {:>9}  {:>9}  {:>10}  {:>10}  \
             {:>6}\n",
            client.peer,
            volume(client),
            duration(client.connected_seconds as u64),
            duration(client.silent_seconds as u64),
            count("read"),
            count("write"),
            Size(client.read_bytes).to_string(),
            Size(client.write_bytes).to_string(),
            mean("read"),
            mean("write"),
            client.errors,
        );
    }
    out
}

fn volume(client: &ClientStatus) -> &str {
    client.volume.as_deref().unwrap_or("-")
}
