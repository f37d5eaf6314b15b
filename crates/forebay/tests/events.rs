//! The events of real servers: what they tell, who has acknowledged it, and that they survive.

#[path = "support/nbdkit.rs"]
mod nbdkit;
mod support;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use nbdkit::Nbdkit;
use serde_json::Value;
use support::nbd::Nbd;
use support::{Place, Server, until};

/// A process that is killed with the test.
struct Helper(Child);

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn events(server: &Server) -> Vec<Value> {
    let lines = server.ask(&["events", "--json"]);
    lines.lines().map(|line| serde_json::from_str(line).expect("it prints JSON")).collect()
}

/// The event of a kind, once there is one.
fn event(server: &Server, kind: &str) -> Value {
    let mut found = None;
    until(kind, || {
        found = events(server).into_iter().find(|event| event["kind"] == kind);
        found.is_some()
    });
    found.expect("it was found")
}

fn primary(place: &Place) -> Nbdkit {
    Nbdkit::start(&place.path("san.sock"), &["file", &place.text("san.img")])
}

#[test]
fn a_primary_that_goes_and_comes_is_told_once_each_and_counted() {
    let place = Place::new();
    place.make("san.img", 64 << 20);
    let mut arguments = place.serve("unused", "cache.img,size=32MiB");
    arguments[1] = format!("--primary=nbd+unix:///?socket={}", place.text("san.sock"));
    let mut san = primary(&place);
    let server = place.start(&arguments);
    let mut client = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it is served");
    let mut buf = vec![0; 4096];
    for round in 1..=2_u64 {
        client.read(round << 20, &mut buf).expect("it is there");
        drop(san);
        // Some requests fail until it is there again.
        client.read((10 + round) << 20, &mut buf).expect_err("the primary is gone");
        until("it is away", || event(&server, "primary-away")["count"] == round);
        san = primary(&place);
        until("it is back", || {
            let _ = client.read((20 + round) << 20, &mut buf);
            events(&server).iter().any(|one| one["kind"] == "primary-back" && one["count"] == round)
        });
    }
    let away = event(&server, "primary-away");
    assert_eq!((&away["severity"], &away["volume"]), (&"error".into(), &"disk".into()));
    assert!(away["text"].as_str().is_some_and(|text| text.contains("san.sock")), "{away}");
    assert!(away["remedy"].as_str().is_some_and(|text| text.contains("bring it back")), "{away}");
    server.stop(&[]);
}

#[test]
fn an_acknowledgement_is_seen_by_all_and_a_restart_keeps_everything() {
    let (place, arguments) = Place::with_disk();
    let server = place.start(&arguments);
    server.ask(&["set", "disk", "mode=write-through"]);
    let changed = event(&server, "setting-changed");
    assert!(changed["text"].as_str().is_some_and(|text| text.contains("write-through")));
    server.ask(&["drain", "disk"]);
    event(&server, "drain-done");
    let id = changed["id"].to_string();
    server.ask(&["events", "ack", &id, "--by=night"]);
    server.ask(&["events", "ack", &id, "--by=day"]);
    let text = server.ask(&["events"]);
    assert!(text.contains("acknowledged by day, night"), "{text}");
    let refused = support::forebay(&["events", "ack", "99", &server.control_argument()]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("no event 99"));
    // What has happened is stored within a second, also if the server is then killed.
    std::thread::sleep(std::time::Duration::from_secs(1));
    let before = events(&server);
    server.kill();
    let server = place.start(&arguments);
    let after = events(&server);
    for event in before.iter().filter(|event| event["kind"] != "server-started") {
        assert!(after.contains(event), "{event} is kept: {after:?}");
    }
    assert_eq!(event(&server, "server-started")["count"], 2);
    server.stop(&[]);
    // A damaged file stops nothing.
    let state = fs::read_dir(place.path("state")).expect("it is there");
    let file = state.map(|entry| entry.expect("it can be read").path());
    let mut file = file.filter(|path| path.extension().is_some_and(|end| end == "events"));
    let file = file.next().expect("there is a file of events");
    let mut bytes = fs::read(&file).expect("it can be read");
    bytes[20] ^= 1;
    fs::write(&file, bytes).expect("it can be written");
    let server = place.start(&arguments);
    let lost = event(&server, "events-lost");
    assert!(lost["text"].as_str().is_some_and(|text| text.contains("damaged")), "{lost}");
    server.stop(&[]);
}

#[test]
fn followers_go_on_with_the_next_server() {
    let (place, arguments) = Place::with_disk();
    let server = place.start(&arguments);
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(["events", "--follow", "--json", &server.control_argument()]);
    let mut follower = command.stdout(Stdio::piped()).spawn().expect("the binary runs");
    let mut lines = BufReader::new(follower.stdout.take().expect("it was asked for")).lines();
    let follower = Helper(follower);
    let mut next = |word: &str| {
        let line = lines.next().expect("it goes on").expect("it is text");
        assert!(line.contains(word), "{word}: {line}");
        serde_json::from_str::<Value>(&line).expect("it prints JSON")
    };
    next("server-started");
    server.ask(&["set", "eviction=lru"]);
    let id = next("setting-changed")["id"].to_string();
    server.ask(&["events", "ack", &id, "--by=me"]);
    assert_eq!(next("\"by\":\"me\"")["id"].to_string(), id);
    server.stop(&[]);
    let server = place.start(&arguments);
    assert_eq!(next("server-started")["count"], 2, "and nothing twice");
    drop(follower);
    server.stop(&[]);
}

/// Regression: a hand-over to a new cache began the numbers again, and streams that went on after
/// number 40 left out the next 40 events.
#[test]
fn followers_go_on_with_a_new_cache() {
    let (place, _) = Place::with_disk();
    let config = place.configure("log_share = \"100%\"");
    let server = place.start_kept(&["serve".to_owned(), format!("--config={config}")]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(["events", "--follow", "--json", &server.control_argument()]);
    let mut follower = command.stdout(Stdio::piped()).spawn().expect("the binary runs");
    let mut lines = BufReader::new(follower.stdout.take().expect("it was asked for")).lines();
    let _follower = Helper(follower);
    let mut id_of = |word: &str| loop {
        let line = lines.next().expect("it goes on").expect("it is text");
        if line.contains(word) {
            let event: Value = serde_json::from_str(&line).expect("it prints JSON");
            return event["id"].as_u64().expect("a number");
        }
    };
    for limit in ["31%", "32%", "33%", "34%"] {
        server.ask(&["set", &format!("dirty_limit={limit}")]);
        id_of(limit);
    }
    let before = events(&server).len();
    place.configure("log_share = \"20%\"");
    server.ask(&["apply", &config]);
    assert!(events(&server).len() >= before, "a new cache has the events of before");
    server.ask(&["set", "dirty_limit=35%"]);
    assert!(id_of("35%") > 4);
    server.stop(&[]);
}

#[test]
fn consumers_are_told_and_slow_ones_delay_nothing() {
    let (place, _) = Place::with_disk();
    let hook = TcpListener::bind("127.0.0.1:0").expect("a port can be had");
    let port = hook.local_addr().expect("it has one").port();
    let config = format!(
        "[cache]\npath = \"{}\"\nsize = \"32MiB\"\nstate_dir = \"{}\"\n[memory]\nram = \"4MiB\"\n\
         [server]\nshards = 1\nnbd = [\"unix:{}\"]\n[control]\nsocket = \"{}\"\n\
         [events]\ncommand = [\"/bin/sh\", \"-c\", \"cat >> '{}'\"]\n\
         webhook = \"http://127.0.0.1:{port}/hook\"\n\
         [[volume]]\nname = \"disk\"\nprimary = \"{}\"\n",
        place.text("cache.img"),
        place.text("state"),
        place.text("nbd.sock"),
        place.text("control.sock"),
        place.text("told"),
        place.text("disk.img"),
    );
    fs::write(place.path("forebay.toml"), config).expect("a file can be written");
    let server =
        place.start(&["serve".to_owned(), format!("--config={}", place.text("forebay.toml"))]);
    // The first delivery hangs: the others wait for it, the server does not.
    let (mut stuck, _) = hook.accept().expect("it is called");
    let told = |word: &str| fs::read_to_string(place.path("told")).is_ok_and(|t| t.contains(word));
    until("the command is told", || told("server-started"));
    server.ask(&["set", "eviction=lru"]);
    until("the command is told", || told("eviction was changed"));
    let mut head = vec![0; 4096];
    let count = stuck.read(&mut head).expect("it sends");
    let head = String::from_utf8_lossy(&head[..count]).into_owned();
    assert!(head.starts_with("POST /hook HTTP/1.1"), "{head}");
    stuck.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").expect("it takes it");
    drop(stuck);
    let (mut next, _) = hook.accept().expect("it is called again");
    let mut text = String::new();
    let mut bytes = [0; 4096];
    until("the next event comes", || {
        let count = next.read(&mut bytes).expect("it sends");
        text += &String::from_utf8_lossy(&bytes[..count]);
        text.contains("eviction was changed")
    });
    server.stop(&[]);
}
