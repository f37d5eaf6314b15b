//! The read-only listener of real servers: who is answered, what is refused, what it costs at most,
//! and that it outlives the server's process.

mod support;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use support::{Place, Server, forebay, until};

const TOKEN: &str = "0123456789abcdef-token";

/// A server's arguments with a listener at a port that the kernel chooses.
fn with_web() -> (Place, Vec<String>) {
    let (place, mut arguments) = Place::with_disk();
    fs::write(place.path("token"), format!("{TOKEN}\n")).expect("a file can be written");
    let private = fs::Permissions::from_mode(0o600);
    fs::set_permissions(place.path("token"), private).expect("it is ours");
    arguments.push("--web=127.0.0.1:0".to_owned());
    arguments.push(format!("--web-token={}", place.text("token")));
    (place, arguments)
}

/// The listener's port, from the log.
fn port(server: &Server) -> u16 {
    let log = server.log("web listener");
    let line = log.lines().rfind(|line| line.contains("web listener")).expect("it is there");
    let digits: String =
        line.rsplit(':').next().expect("a port").chars().filter(char::is_ascii_digit).collect();
    digits.parse().expect("a port")
}

/// Sends a head, and returns the whole answer.
fn ask(port: u16, head: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("it listens");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("it can be set");
    stream.write_all(head.as_bytes()).expect("it takes a head");
    let mut answer = Vec::new();
    // It may close before it has read everything.
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

fn get(port: u16, path: &str, host: &str, token: Option<&str>) -> String {
    let token = token.map_or(String::new(), |token| format!("Authorization: Bearer {token}\r\n"));
    let head = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n{token}Connection: close\r\n\r\n");
    ask(port, &head)
}

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|word| word.parse().ok()).unwrap_or(0)
}

#[test]
fn only_those_with_the_token_and_a_name_of_the_server_get_anything() {
    let (place, arguments) = with_web();
    let server = place.start(&arguments);
    let port = port(&server);
    let local = format!("127.0.0.1:{port}");
    let paths = [
        "/v1/status",
        "/v1/volumes/disk",
        "/v1/statistics?window=1h",
        "/v1/events",
        "/v1/jobs",
        "/metrics",
        "/openapi.json",
    ];
    for path in paths {
        assert_eq!(status(&get(port, path, &local, Some(TOKEN))), 200, "{path}");
        for token in [None, Some("wrong"), Some(&TOKEN[1..])] {
            assert_eq!(status(&get(port, path, &local, token)), 401, "{path}");
        }
        let elsewhere = get(port, path, "evil.example", Some(TOKEN));
        assert_eq!(status(&elsewhere), 421, "{path}");
    }
    for path in ["/v1/stream", "/v1/events/stream", "/nothing"] {
        assert_eq!(status(&get(port, path, &local, None)), 401, "{path}");
    }
    for (path, word) in [("/", "<!doctype html>"), ("/app.js", "use"), ("/uplot.js", "uPlot")] {
        let answer = get(port, path, &local, None);
        assert!(status(&answer) == 200 && answer.contains(word), "{path}");
        assert_eq!(status(&get(port, path, "evil.example", None)), 421, "{path}");
        let answer = answer.to_lowercase();
        let headers =
            ["content-security-policy: default-src 'none'", "x-content-type-options: nosniff"];
        assert!(headers.iter().all(|header| answer.contains(header)), "{path}");
        assert!(!answer.contains("access-control-"), "{path}");
    }
    assert_eq!(status(&get(port, "/nothing", &local, Some(TOKEN))), 404);
    server.stop(&[]);
}

#[test]
fn nothing_can_be_changed() {
    let (place, arguments) = with_web();
    let server = place.start(&arguments);
    let port = port(&server);
    let answers = [
        ("POST", "/v1/stop"),
        ("POST", "/v1/drain"),
        ("DELETE", "/v1/jobs/1"),
        ("PUT", "/v1/status"),
        ("OPTIONS", "/v1/status"),
        ("POST", "/v1/events/1/ack"),
    ];
    for (method, path) in answers {
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\
             Content-Length: 2\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n{{}}"
        );
        assert_eq!(status(&ask(port, &head)), 405, "{method} {path}");
    }
    // GETs of what only the control socket has.
    assert_eq!(status(&get(port, "/v1/upgrade", "localhost", Some(TOKEN))), 404);
    assert_eq!(server.status()["state"], "serving");
    server.stop(&[]);
}

#[test]
fn clients_that_are_slow_large_or_many_cost_little() {
    let (place, arguments) = with_web();
    let server = place.start(&arguments);
    let port = port(&server);
    let long = "x".repeat(200 << 10);
    let head = format!("GET / HTTP/1.1\r\nHost: localhost\r\nX: {long}\r\n\r\n");
    assert!([0, 400, 431].contains(&status(&ask(port, &head))), "a head is limited");
    let head = "GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n";
    assert_eq!(status(&ask(port, head)), 413, "a body is refused before it is sent");
    // 64 connections that say nothing take every place, until their time is over.
    let begun = Instant::now();
    let idle: Vec<TcpStream> =
        (0..64).map(|_| TcpStream::connect(("127.0.0.1", port)).expect("it listens")).collect();
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(status(&get(port, "/", "localhost", None)), 200);
    let waited = begun.elapsed();
    assert!(waited > Duration::from_secs(5), "64 connections are the limit: {waited:?}");
    assert!(waited < Duration::from_secs(20), "idle connections are closed: {waited:?}");
    drop(idle);
    server.stop(&[]);
}

#[test]
fn streams_are_limited_and_delay_no_stop() {
    let (place, arguments) = with_web();
    let server = place.start(&arguments);
    let port = port(&server);
    let head = format!(
        "GET /v1/stream HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    );
    let open = || {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("it listens");
        stream.write_all(head.as_bytes()).expect("it takes a head");
        let mut begin = [0; 12];
        stream.read_exact(&mut begin).expect("it answers");
        (stream, String::from_utf8_lossy(&begin).into_owned())
    };
    let streams: Vec<_> = (0..32).map(|_| open()).collect();
    assert!(streams.iter().all(|(_, begin)| begin.ends_with("200")));
    assert!(open().1.ends_with("503"), "the 33rd is refused");
    assert_eq!(status(&get(port, "/metrics", "localhost", Some(TOKEN))), 200, "others are served");
    let mut seen = vec![0; 64 << 10];
    let (mut first, _) = streams.into_iter().next().expect("there are 32");
    let mut text = String::new();
    until("an update comes", || {
        let count = first.read(&mut seen).expect("it can be read");
        text += &String::from_utf8_lossy(&seen[..count]);
        text.contains("event: update") && text.contains("server-started")
    });
    let begun = Instant::now();
    server.stop(&[]);
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
}

#[test]
fn the_socket_outlives_a_killed_server() {
    let (place, arguments) = with_web();
    let server = place.start_kept(&arguments);
    let port = port(&server);
    assert_eq!(status(&get(port, "/metrics", "localhost", Some(TOKEN))), 200);
    server.kill_kept();
    // The keeper holds the socket: this waits for the next server.
    assert_eq!(status(&get(port, "/metrics", "localhost", Some(TOKEN))), 200);
    let events = server.ask(&["events"]);
    assert!(events.contains("server-restarted"), "{events}");
    server.stop(&[]);
}

#[test]
fn a_unix_socket_needs_no_token_and_a_port_does() {
    let (place, mut arguments) = Place::with_disk();
    arguments.push(format!("--web=unix:{},mode=0640", place.text("web.sock")));
    let server = place.start(&arguments);
    let mut stream = UnixStream::connect(place.path("web.sock")).expect("it listens");
    let head = "GET /metrics HTTP/1.1\r\nHost: any\r\nConnection: close\r\n\r\n";
    stream.write_all(head.as_bytes()).expect("it takes a head");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    assert!(answer.contains("forebay_up"), "{answer}");
    let mode = fs::metadata(place.path("web.sock")).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
    server.stop(&[]);
    assert!(!place.path("web.sock").exists(), "it is removed");

    // Regression: the next server, which got the socket from the keeper, left the file.
    let server = place.start_kept(&arguments);
    server.kill_kept();
    server.log("the server serves again");
    assert!(place.path("web.sock").exists(), "it is still served");
    server.stop(&[]);
    assert!(!place.path("web.sock").exists(), "it is removed by the next server");

    let refuse = |web: &str, token: Option<&str>| {
        let (place, mut arguments) = Place::with_disk();
        arguments.push(format!("--web={web}"));
        if let Some(token) = token {
            fs::write(place.path("token"), token).expect("a file can be written");
            arguments.push(format!("--web-token={}", place.text("token")));
        }
        let output = forebay(&arguments);
        assert_eq!(output.status.code(), Some(2), "{web} {token:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(refuse("127.0.0.1:0", None).contains("token_file"));
    assert!(refuse("127.0.0.1", None).contains("no port"));
    // A new file can be read by everybody.
    assert!(refuse("127.0.0.1:0", Some(TOKEN)).contains("lets others use it"));
}
