//! Rules as text, and the requests that they tell apart.

use super::*;
use proptest::prelude::*;

fn rule(text: &str) -> RequestRule {
    text.parse().unwrap_or_else(|error| panic!("{text:?}: {error}"))
}

fn rules(texts: &[&str]) -> RequestRules {
    let all: Vec<_> = texts.iter().map(|text| rule(text)).collect();
    let volume = |name: &str| ["db", "vm"].iter().position(|known| *known == name);
    let user = |name: &str| (name == "backup").then_some(34);
    RequestRules::new(&all, |name| volume(name).map(|at| VolumeId(at as u8)), user)
}

fn process(name: &str) -> Sender {
    let executable = Some(format!("/usr/bin/{name}"));
    let cgroup = Some(format!("/system.slice/{name}.service"));
    Sender {
        process: Some(name.to_owned()),
        executable,
        cgroup,
        user: Some(34),
        ..Sender::default()
    }
}

const DB: VolumeId = VolumeId(0);
const VM: VolumeId = VolumeId(1);

fn decided(rules: &RequestRules, sender: &Sender, volume: VolumeId) -> Option<usize> {
    let range = ByteRange::new(1 << 20, 4096);
    let found = rules.decide(rules.of(sender), volume, Direction::Read, range);
    found.map(|(at, _)| at)
}

#[test]
fn the_first_rule_that_matches_decides() {
    let all = rules(&["cache process=mariadbd", "bypass user=backup volume=db", "cache", "bypass"]);
    let (server, backup) = (process("mariadbd"), process("restic"));
    assert_eq!(decided(&all, &server, DB), Some(0));
    assert_eq!(decided(&all, &backup, DB), Some(1));
    assert_eq!(decided(&all, &backup, VM), Some(2));
    assert_eq!(decided(&all, &Sender::default(), DB), Some(2));
    let range = ByteRange::new(0, 512);
    let of = all.decide(all.of(&backup), DB, Direction::Write, range);
    assert_eq!(of, Some((1, Treatment::Bypass)));
}

#[test]
fn each_condition_tells_requests_apart() {
    let from = |address: &str| Sender {
        address: Some(address.parse().expect("an address")),
        certificate: vec!["db1.example.org".to_owned()],
        ..Sender::default()
    };
    let nobody = Sender::default();
    for (text, yes, no) in [
        ("bypass process=res*", process("restic"), process("rsync")),
        ("bypass process=restic", process("restic"), process("restic2")),
        ("bypass executable=/usr/bin/restic", process("restic"), nobody.clone()),
        ("bypass cgroup=system.slice", process("restic"), nobody.clone()),
        ("bypass cgroup=/system.slice/a.service", process("a"), process("b")),
        ("bypass cgroup=/system.slice/a", process("a/x"), process("ab")),
        ("bypass user=34", process("a"), Sender { user: Some(3), ..process("a") }),
        ("bypass user=backup", process("a"), nobody.clone()),
        ("bypass client=10.1.0.0/16", from("10.1.2.3"), from("10.2.2.3")),
        ("bypass client=10.1.2.3", from("::ffff:10.1.2.3"), from("10.1.2.4")),
        ("bypass client=fd00::/8", from("fd12::1"), from("10.1.2.3")),
        ("bypass client=0.0.0.0/0", from("1.2.3.4"), nobody.clone()),
        ("bypass certificate=db*", from("10.1.2.3"), nobody.clone()),
    ] {
        let all = rules(&[text]);
        assert_eq!(decided(&all, &yes, DB), Some(0), "{text}");
        assert_eq!(decided(&all, &no, DB), None, "{text}");
    }
    // A user whom nobody knows is not everybody who is unknown.
    assert_eq!(decided(&rules(&["bypass user=nobody-knows"]), &nobody, DB), None);
    assert_eq!(decided(&rules(&["bypass volume=gone"]), &nobody, DB), None);
}

#[test]
fn requests_are_told_apart_by_place_length_and_direction() {
    let hit = |text: &str, direction, offset, len| {
        let all = rules(&[text]);
        let set = all.of(&Sender::default());
        all.decide(set, DB, direction, ByteRange::new(offset, len)).is_some()
    };
    let read = Direction::Read;
    assert!(hit("bypass range=1MiB..2MiB", read, 1 << 20, 4096));
    assert!(hit("bypass range=1MiB..2MiB", read, (2 << 20) - 512, 4096));
    assert!(!hit("bypass range=1MiB..2MiB", read, 2 << 20, 4096));
    assert!(hit("bypass range=2MiB..", read, 2 << 20, 4096));
    assert!(hit("bypass size=..4KiB", read, 0, 4096));
    assert!(!hit("bypass size=..4KiB", read, 0, 4608));
    assert!(hit("bypass size=4KiB", read, 0, 4096));
    assert!(!hit("bypass size=8KiB..", read, 0, 4096));
    assert!(hit("bypass operation=read", read, 0, 512));
    assert!(!hit("bypass operation=write", read, 0, 512));
}

#[test]
fn only_some_rules_need_the_process() {
    assert!(!rules(&["bypass user=1 client=::1 certificate=a size=..1"]).ask_for_process());
    for text in ["bypass process=a", "bypass executable=/a", "cache cgroup=a"] {
        assert!(rules(&["bypass", text]).ask_for_process(), "{text}");
    }
}

#[test]
fn a_rule_that_cannot_be_read_says_why() {
    for (text, says) in [
        ("", "begins with cache or bypass"),
        ("admit process=a", "begins with cache or bypass"),
        ("bypass restic", "write KEY=VALUE"),
        ("bypass process=", "write KEY=VALUE"),
        ("bypass proc=a", "there is no condition \"proc\""),
        ("bypass process=a process=b", "given twice"),
        ("bypass size=1 size=2", "given twice"),
        ("bypass client=10.0.0.0/33", "use an address"),
        ("bypass client=here", "use an address"),
        ("bypass range=5", "use two places"),
        ("bypass range=2..1", "ends before it begins"),
        ("bypass size=4kb", "use sizes"),
        ("bypass size=99999999TiB..", "use sizes"),
        ("bypass size=5..4", "larger"),
        ("bypass operation=trim", "use read or write"),
        ("bypass process=\"a", "closing quote"),
        ("bypass process=a;b", "semicolon"),
        ("bypass process=a\nb", "control character"),
    ] {
        let error = text.parse::<RequestRule>().expect_err(text);
        assert!(error.contains(says), "{text:?}: {error}");
    }
    let long = format!("bypass process={}", "é".repeat(600));
    assert!(long.parse::<RequestRule>().is_err());
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in "\\PC{0,80}") {
        if let Ok(rule) = text.parse::<RequestRule>() {
            prop_assert_eq!(rule.to_string().parse::<RequestRule>(), Ok(rule));
        }
    }

    #[test]
    fn a_rule_is_written_as_it_is_read(
        bypass: bool,
        words in prop::collection::vec(0usize..10, 0..6),
        name in "[a-zA-Z0-9/. *-]{1,20}",
        (a, b) in (0u64..1 << 50, 0u64..1 << 50),
    ) {
        let mut text = if bypass { "bypass".to_owned() } else { "cache".to_owned() };
        let (low, high) = (a.min(b), a.max(b) + 1);
        let mut seen = Vec::new();
        for word in words {
            if !seen.contains(&word) {
                seen.push(word);
                text += &match word {
                    0 => format!(" process=\"{name}\""),
                    1 => format!(" executable=\"{name}\""),
                    2 => format!(" cgroup=\"{name}\""),
                    3 => format!(" user=\"{name}\""),
                    4 => " client=10.0.0.0/8".to_owned(),
                    5 => format!(" certificate=\"{name}\""),
                    6 => format!(" volume=\"{name}\""),
                    7 => " operation=write".to_owned(),
                    8 => format!(" range={low}..{high}"),
                    _ => format!(" size={low}..{high}"),
                };
            }
        }
        let read: RequestRule = text.parse().map_err(TestCaseError::fail)?;
        prop_assert_eq!(read.to_string().parse::<RequestRule>(), Ok(read));
    }
}
