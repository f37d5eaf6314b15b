//! The scripts by which shells complete commands: bash runs its own, as it does at a tab.

use std::process::Command;

const FOREBAY: &str = env!("CARGO_BIN_EXE_forebay");

/// Completes the last of `words` as bash does; each candidate is a word.
fn completed(words: &[&str]) -> Vec<String> {
    let script = r#"
        source <("$1" completions bash)
        shift
        COMP_WORDS=("$@")
        COMP_CWORD=$(($# - 1))
        _forebay forebay "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        printf '%s\n' "${COMPREPLY[@]}"
    "#;
    let mut bash = Command::new("bash");
    let output = bash.args(["-c", script, "bash", FOREBAY]).args(words).output();
    let output = output.expect("bash runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{words:?}: {said}");
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

#[test]
fn bash_completes_commands_flags_and_values() {
    let cases: [(&[&str], &[&str]); 6] = [
        (&["forebay", "sta"], &["status"]),
        (&["forebay", "trace", "rec"], &["record"]),
        (&["forebay", "drain", "--ba"], &["--background"]),
        (&["forebay", "serve", "--write-cache-d"], &["--write-cache-depth"]),
        (&["forebay", "serve", "--eviction", "l"], &["lru"]),
        (&["forebay", "completions", "f"], &["fish"]),
    ];
    for (words, candidates) in cases {
        assert_eq!(completed(words), candidates, "{words:?}");
    }
}

#[test]
fn bash_completes_settings_with_their_values() {
    let eviction = ["fifo", "lru", "frequency", "default"].map(|name| format!("eviction={name}"));
    assert_eq!(completed(&["forebay", "set", "ev"]), eviction);
    let mode = completed(&["forebay", "set", "db", "mode"]);
    assert!(mode.contains(&"mode=write-through".to_owned()), "{mode:?}");
    assert!(mode.iter().all(|word| word.starts_with("mode=")), "{mode:?}");
}

#[test]
fn every_shell_has_a_script() {
    for (shell, word) in [("bash", "complete -F"), ("zsh", "#compdef"), ("fish", "complete -c")] {
        let output = Command::new(FOREBAY).args(["completions", shell]).output();
        let output = output.expect("the binary runs");
        let script = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && script.contains(word), "{shell}: {script}");
        assert!(script.contains("salvage"), "{shell}: {script}");
    }
}
