//! Wrong usage: exit code 2, nothing on standard output, and a message that says what to do.

use std::process::{Command, Output};

fn forebay(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(arguments).env_remove("XDG_RUNTIME_DIR").env_remove("FOREBAY_LOG");
    command.output().expect("the binary runs")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn wrong_usage_is_2_and_says_what_to_do() {
    let serve = ["serve", "--primary=p", "--cache=c", "--nbd=unix:s"];
    let refused: [(&[&str], &str); 13] = [
        (&[], "Usage"),
        (&["srve"], "serve"),
        (&["serve"], "--primary"),
        (&["serve", "--config=x", "--primary=y"], "cannot be used with"),
        (&["drain"], "VOLUME"),
        (&["drain", "db", "--job=1"], "cannot be used with"),
        (&["set", "db"], "KEY=VALUE"),
        (&["set", "db", "mode"], "KEY=VALUE"),
        (&["set", "db", "depth=3"], "use one of: mode"),
        (&["set", "db", "mode=a", "mode=b"], "twice"),
        (&["check"], "CACHE"),
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
        ("--tls=required", "tls_cert"),
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
        "serve", "status", "drain", "stop", "set", "attach", "detach", "check", "dump", "salvage",
        "analyze",
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
    let commands: [&[&str]; 4] =
        [&["status"], &["drain", "db"], &["stop"], &["set", "db", "mode=write-back"]];
    for command in commands {
        let output = forebay(&[command, &[nowhere]].concat());
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "{command:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains("/nonexistent/forebay.sock") && said.contains("forebay serve"));
    }
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
