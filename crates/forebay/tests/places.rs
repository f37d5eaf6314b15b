//! Places for clients: TCP clients leave some to the Unix socket, and a client without a place is
//! told the reason.

mod support;
#[path = "support/tools.rs"]
mod tools;

use std::process::Command;

use support::Place;
use support::nbd::Nbd;
use tools::have;

/// Starts a server with eight places and a port.
fn serve(place: &Place, endpoint: &str, more: &[&str]) -> support::Server {
    place.make("disk.img", 16 << 20);
    let mut arguments = place.serve("disk.img", "cache.img,size=32MiB");
    arguments.push(format!("--nbd={endpoint}"));
    arguments.extend(more.iter().map(|&argument| argument.to_owned()));
    place.start(&arguments)
}

#[test]
fn clients_over_tcp_do_not_lock_out_the_unix_socket_and_hear_why() {
    let place = Place::new();
    let server = serve(&place, "tcp:127.0.0.1:0", &["--max-clients=8"]);
    let port = server.port();
    let connect = || Nbd::connect_tcp(port, "disk");
    let _clients: Vec<_> = (0..7).map(|_| connect().expect("there is a place")).collect();
    for _ in 0..5 {
        assert!(connect().is_err(), "the last place is not for TCP");
    }
    let mut local = Nbd::connect(&place.path("nbd.sock"), "disk").expect("a place is kept");
    local.write(0, &[7; 4096], true).expect("it serves");

    let log = server.log("clients were refused");
    assert_eq!(log.matches("clients were refused").count(), 1, "one line for all: {log}");
    let status = server.ask(&["status", "--json"]);
    assert!(status.contains("\"clients\": 8"), "{status}");
    if have(&["qemu-img"]) {
        let uri = format!("nbd://127.0.0.1:{port}/disk");
        let told = Command::new("qemu-img").args(["info", &uri]).output().expect("it runs");
        let told = String::from_utf8_lossy(&told.stderr).into_owned();
        assert!(told.contains("all places for clients are taken"), "{told}");
    }
}

#[test]
fn a_port_that_the_network_reaches_without_tls_is_warned_of() {
    let place = Place::new();
    let server = serve(&place, "tcp:0.0.0.0:0", &[]);
    server.log("ANYBODY who reaches tcp:0.0.0.0:");
    server.stop(&[]);
    let server = serve(&place, "tcp:127.0.0.1:0", &[]);
    let log = server.log(" serving ");
    assert!(!log.contains("ANYBODY"), "{log}");
}
