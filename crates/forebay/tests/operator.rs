//! A short run of the random operator: the server holds up, and a primary that acknowledges flushes
//! without doing them is detected. `make test` and `make proof` run it for longer.

use std::path::PathBuf;

use forebay_bench::operator;
use forebay_bench::rig::cleanup;

fn operate(seconds: u64, seed: u64, lie: bool) -> anyhow::Result<()> {
    let binary = PathBuf::from(env!("CARGO_BIN_EXE_forebay"));
    operator::run(&operator::quick(binary, seconds, seed, lie))
}

#[test]
fn nothing_is_lost_whatever_an_operator_does() {
    cleanup::protect().expect("signals can be caught");
    operate(10, 1, false).expect("everything holds");
}

/// The check of the check.
#[test]
fn a_primary_that_lies_about_flushes_is_found() {
    let found = (1..20).find_map(|seed| operate(5, seed, true).err());
    let said = format!("{:#}", found.expect("its power fails, and what was flushed is gone"));
    assert!(said.contains("volume san") || said.contains("of san"), "{said}");
    assert!(said.contains("it may have") || said.contains("not durable"), "{said}");
}
