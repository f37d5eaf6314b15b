//! Wrong usage: exit code 2, nothing on standard output, and a message that names the remedy.

use std::process::{Command, Output};

fn forebay(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    let command = command.args(arguments).env_remove("XDG_RUNTIME_DIR");
    command.env_remove("FOREBAY_LOG").env_remove("FOREBAY_CONTROL");
    command.output().expect("the binary runs")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn wrong_usage_is_2_and_says_what_to_do() {
    let serve = ["serve", "--primary=p", "--cache=c", "--nbd=unix:s"];
    let refused: [(&[&str], &str); 17] = [
        (&[], "Usage"),
        (&["srve"], "serve"),
        (&["serve"], "--primary"),
        (&["serve", "--config=x", "--primary=y"], "cannot be used with"),
        (&["drain", "db", "--list"], "cannot be used with"),
        (&["drain", "db", "--job=1"], "cannot be used with"),
        (&["set", "db"], "KEY=VALUE"),
        (&["set", "db", "mode"], "KEY=VALUE"),
        (&["set", "db", "depth=3"], "use one of: mode"),
        (&["set", "db", "mode=write-back", "mode=default"], "twice"),
        (&["set", "db", "mode=wb"], "write-back"),
        (&["set", "db", "eviction=mru"], "lru"),
        (&["serve"], "serve --config <FILE>"),
        (&["check"], "CACHE"),
        (&["setup", "--name=a b"], "\"a b\" cannot be used; use 1 to 64 of"),
        (&["analyze"], "PATH"),
        (&["serve", "--primary=p", "--cache=p", "--nbd=unix:s"], "is the cache device"),
    ];
    for (arguments, word) in refused {
        let output = forebay(arguments);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        assert!(said.contains(word), "{arguments:?}: {word:?} is missing from {said}");
    }
    for (flag, word) in [
        ("--mode=writeback", "write-back"),
        ("--ram=lots", "KiB"),
        ("--dirty-limit=99%", "90%"),
        ("--name=a/b", "cannot be used"),
        ("--nbd=tcp:1", "tcp:HOST:PORT"),
        ("--shards=65", "1 to 64"),
        ("--max-clients=901", "1 to 900"),
        ("--tls=required", "no endpoint uses it"),
        ("--fuse-transport=uring", "io-uring"),
        ("--name=.forebay", "cannot be used"),
    ] {
        let output = forebay(&[&serve[..], &[flag]].concat());
        assert_eq!(output.status.code(), Some(2), "{flag}: {}", said(&output));
        assert!(said(&output).contains(word), "{flag}: {}", said(&output));
    }
}

#[test]
fn help_is_0_and_has_an_example() {
    for command in [
        "serve", "status", "drain", "stop", "set", "apply", "config", "attach", "detach", "check",
        "dump", "salvage", "analyze",
    ] {
        let output = forebay(&[command, "--help"]);
        assert_eq!(output.status.code(), Some(0), "{command}");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains(&format!("forebay {command}")), "{command}: {text}");
    }
}

#[test]
fn commands_without_a_server_fail_with_1_in_one_line() {
    let nowhere = "--control=/nonexistent/forebay.sock";
    let commands: [&[&str]; 5] =
        [&["status"], &["drain", "db"], &["stop"], &["set", "db", "mode=write-back"], &["config"]];
    for command in commands {
        let output = forebay(&[command, &[nowhere]].concat());
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "{command:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains("/nonexistent/forebay.sock") && said.contains("forebay serve"));
    }
}

#[test]
fn what_set_knows_is_what_its_help_says() {
    let help = forebay(&["set", "--help"]);
    let help = String::from_utf8_lossy(&help.stdout).into_owned();
    let refused = said(&forebay(&["set", "db", "depth=3"]));
    let known = refused.split_once("use one of: ").expect("it says which").1;
    let known: Vec<&str> = known.trim().split(", ").collect();
    assert!(known.contains(&"mode") && known.contains(&"dirty_limit"), "{refused}");
    for key in known {
        assert!(help.contains(&format!("- {key}")), "{key}: {help}");
    }
}

/// Runs a server with these changes to valid arguments; returns its exit code and last line.
fn serve(change: &[&str]) -> (Option<i32>, String) {
    let directory = std::env::temp_dir().join(format!("forebay-usage-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory can be made");
    let at = |name: &str| directory.join(name).to_string_lossy().into_owned();
    std::fs::write(directory.join("disk.img"), [0; 4096]).expect("a file can be written");
    let usual = [
        format!("--primary={}", at("disk.img")),
        format!("--cache={}", at("none.img")),
        format!("--nbd=unix:{}", at("nbd.sock")),
        format!("--control={}", at("control.sock")),
        format!("--state={}", at("state")),
    ];
    let name = |argument: &str| argument.split('=').next().unwrap_or_default().to_owned();
    let given: Vec<String> = change.iter().map(|argument| name(argument)).collect();
    let usual = usual.iter().filter(|argument| !given.contains(&name(argument)));
    let arguments: Vec<&str> = ["serve"].into_iter().chain(usual.map(String::as_str)).collect();
    let output = forebay(&[&arguments[..], change].concat());
    let last = said(&output).lines().last().unwrap_or_default().to_owned();
    std::fs::remove_dir_all(&directory).expect("it can be removed");
    (output.status.code(), last)
}

#[test]
fn errors_of_the_system_are_said_once_and_with_what_to_do() {
    let long = format!("--nbd=unix:/tmp/{}", "a".repeat(120));
    let control = format!("--control=/tmp/{}", "a".repeat(120));
    let refused: [(&[&str], i32, &str, &str); 10] = [
        (&["--primary=/no/such"], 1, "No such file or directory", "name one that is there"),
        (&["--primary=nbd+unix:///x?socket=/no/such"], 1, "No such file", "one that is there"),
        (&["--primary=nbd://127.0.0.1:1/x"], 1, "Connection refused", "start its server"),
        (&["--nbd=unix:/no/such/s"], 1, "No such file or directory", "make its directory"),
        (&[&long], 1, "File name too long", "107 bytes"),
        (&[&control], 1, "its path has 125 bytes", "the limit of Unix sockets is 107"),
        (&["--fuse=/no/such"], 1, "there is no such directory", "mkdir -p /no/such"),
        (&["--primary=s3://bucket/x"], 2, "unknown scheme \"s3\"", "nbdkit"),
        (&["--primary=nbds://host/x"], 2, "TLS to a primary", "nbd://"),
        (&["--primary=x?sed=1"], 2, "unknown parameter \"sed\"", "emulate, delay, fault, seed"),
    ];
    for (change, code, what, hint) in refused {
        let (found, line) = serve(change);
        assert_eq!(found, Some(code), "{line}");
        assert_eq!(line.matches(what).count(), 1, "{what:?} once in {line}");
        assert!(line.contains(hint), "{hint:?} is missing from {line}");
        assert!(!line.contains("entity not found"), "{line}");
    }
}

#[test]
fn a_file_that_is_not_there_is_said_so_by_every_command() {
    let commands: [&[&str]; 5] = [
        &["check", "/no/such"],
        &["dump", "/no/such"],
        &["salvage", "/no/such", "--list"],
        &["analyze", "/no/such"],
        &["trace", "simulate", "/no/such", "--size=10%"],
    ];
    for command in commands {
        let output = forebay(command);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        let what = "/no/such: No such file or directory (os error 2); name one that is there\n";
        assert!(said.ends_with(what) && said.lines().count() == 1, "{said}");
    }
}

#[test]
fn the_environment_may_say_where_the_server_is() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    let output = command.arg("status").env("FOREBAY_CONTROL", "/nonexistent/of-the-environment");
    let said = said(&output.output().expect("the binary runs"));
    assert!(said.contains("no server answers at /nonexistent/of-the-environment"), "{said}");
}

#[test]
fn a_configuration_that_cannot_be_used_names_its_line() {
    let path = std::env::temp_dir().join(format!("forebay-usage-{}.toml", std::process::id()));
    std::fs::write(&path, "[cache]\npath = \"c\"\nsise = 1\n").expect("a file can be written");
    let output = forebay(&["serve", "--config", &path.to_string_lossy()]);
    std::fs::remove_file(&path).expect("it can be removed");
    let said = said(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("line 3") && said.contains("`sise`") && said.contains("`size`"));
    let output = forebay(&["serve", "--config", "/nonexistent/forebay.toml"]);
    assert_eq!(output.status.code(), Some(1));
}
