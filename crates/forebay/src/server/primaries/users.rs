//! The primaries that a server or a salvage uses, in the state directory. A user that ends in order
//! takes its list away; one that is killed leaves it. Then requests that it has sent may still be
//! carried out by the servers of the primaries, and the next user waits for them
//! ([`BlockDevice::await_stragglers`]). So may requests of a connection that broke shortly before
//! the end: the list keeps those primaries ([`BlockDevice::has_stragglers`]).
//!
//! A list counts until the machine starts again: nothing is on its way that long.

use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use forebay_device::{BlockDevice, STRAGGLE_MAX};
use forebay_runtime::{StateDir, file_of, is_full, sealed, unsealed};

/// First line of the file.
const HEADING: &str = "forebay primaries in use 1";
/// The kind of file.
pub const KIND: &str = "uses";
/// Longest file that is read, in bytes: the names of all primaries, and a few lines more.
const BYTES_MAX: u64 = 64 << 10;
/// The file with the id of this start of the machine.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The list of a running server, or of a salvage.
#[derive(Clone)]
pub struct Users {
    state: StateDir,
    name: String,
    boot: String,
    primaries: Vec<Arc<dyn BlockDevice>>,
    /// Primaries on the list of the user of this cache before, if they are not among ours.
    left: BTreeSet<String>,
    began: Instant,
}

impl Users {
    /// Puts the primaries of the cache `uuid` on record. Those that another server has left there
    /// are told to wait; it is assumed that it no longer runs.
    ///
    /// # Errors
    /// If the state directory cannot be read or written.
    pub fn begin(
        state: &StateDir,
        uuid: [u8; 16],
        primaries: &[Arc<dyn BlockDevice>],
    ) -> io::Result<Self> {
        // Where it cannot be read, every list counts ([`parse`]).
        let boot = std::fs::read_to_string(BOOT_ID).unwrap_or_default();
        let boot = boot.trim().to_owned();
        let name = file_of(uuid, KIND);
        let ours: BTreeSet<String> = primaries.iter().map(|one| identity(&**one)).collect();
        let (mut shared, mut left) = (BTreeSet::new(), BTreeSet::new());
        let mut others = Vec::new();
        let is_list = |name: &String| Path::new(name).extension().is_some_and(|end| end == KIND);
        for other in state.names()?.into_iter().filter(is_list) {
            let text = match state.read(&other, BYTES_MAX) {
                Err(error) if error.kind() == ErrorKind::InvalidData => String::new(),
                read => read?.unwrap_or_default(),
            };
            // A list that is damaged is not known to be without ours.
            let listed = parse(&text, &boot).unwrap_or_else(|| Some(ours.clone()));
            let Some(listed) = listed else {
                if other != name {
                    others.push((other, BTreeSet::new()));
                }
                continue;
            };
            shared.extend(listed.intersection(&ours).cloned());
            let rest: BTreeSet<String> = listed.difference(&ours).cloned().collect();
            if other == name {
                left = rest;
            } else if rest.len() < listed.len() {
                // One without ours may be in use.
                others.push((other, rest));
            }
        }
        for primary in primaries.iter().filter(|one| shared.contains(&identity(&***one))) {
            primary.await_stragglers();
        }
        // From here on this list has them. An empty one takes no space, and counts for every
        // primary, as a damaged one does.
        match state.replace(&name, &print(&(&ours | &left), &boot)) {
            Err(error) if is_full(&error) => state.empty(&name)?,
            replaced => replaced?,
        }
        for (other, rest) in others {
            match rest.is_empty() {
                true => state.remove(&other)?,
                false => state.replace(&other, &print(&rest, &boot))?,
            }
        }
        let (state, primaries, began) = (state.clone(), primaries.to_vec(), Instant::now());
        Ok(Self { state, name, boot, primaries, left, began })
    }

    /// Takes the list away, or what is left of it: primaries whose stragglers may still arrive.
    /// Every request must have ended.
    ///
    /// # Errors
    /// If it stays: the next start waits without a need.
    pub fn end(&self) -> io::Result<()> {
        let straggling = self.primaries.iter().filter(|one| one.has_stragglers());
        let mut left: BTreeSet<String> = straggling.map(|one| identity(&**one)).collect();
        if self.began.elapsed() < STRAGGLE_MAX {
            left.extend(self.left.iter().cloned());
        }
        match left.is_empty() {
            true => self.state.remove(&self.name),
            false => self.state.replace(&self.name, &print(&left, &self.boot)),
        }
    }
}

/// The name of a primary, in one line.
fn identity(primary: &dyn BlockDevice) -> String {
    primary.info().identity.escape_default().to_string()
}

fn print(primaries: &BTreeSet<String>, boot: &str) -> String {
    let lines: String = primaries.iter().map(|one| format!("primary {one}\n")).collect();
    sealed(&format!("{HEADING}\nboot {boot}\n{lines}"))
}

/// The primaries of a list; `Some(None)` if it is known to be of another start of the machine,
/// `None` if it is not a whole list.
fn parse(text: &str, boot: &str) -> Option<Option<BTreeSet<String>>> {
    let mut lines = unsealed(text)?.lines();
    if lines.next()? != HEADING {
        return None;
    }
    let theirs = lines.next()?.strip_prefix("boot ")?;
    let counts = theirs == boot || theirs.is_empty() || boot.is_empty();
    let primary = |line: &str| Some(line.strip_prefix("primary ")?.to_owned());
    let listed = lines.map(primary).collect::<Option<_>>()?;
    Some(counts.then_some(listed))
}

#[cfg(test)]
mod tests {
    use forebay_device::AwayDevice;

    use super::*;

    #[test]
    fn a_list_counts_unless_it_is_of_another_start_or_not_whole() {
        let primaries: BTreeSet<String> = ["disk:a", "nbd://h/x"].map(str::to_owned).into();
        let text = print(&primaries, "b1");
        assert_eq!(parse(&text, "b1"), Some(Some(primaries.clone())));
        assert_eq!(parse(&text, "b2"), Some(None));
        assert_eq!(parse(&text, ""), Some(Some(primaries.clone())), "the start is not known");
        let nameless = print(&primaries, "");
        assert_eq!(parse(&nameless, "b1"), Some(Some(primaries)), "nor is the list's");
        for cut in 0..text.len() {
            assert_eq!(parse(&text[..cut], "b1"), None, "{cut} bytes");
        }
        assert_eq!(parse(&sealed(&format!("{HEADING}\nboot b1\nother x\n")), "b1"), None);
    }

    /// Regression: a start without a primary of the server before, which was killed, forgot it.
    #[test]
    fn what_the_killed_one_used_stays_on_record_until_nothing_of_it_can_arrive() {
        let dir = std::env::temp_dir().join(format!("forebay-left-{}", std::process::id()));
        let state = StateDir::open(&dir).expect("a directory can be made");
        let primary = |name: &str| -> Arc<dyn BlockDevice> {
            Arc::new(AwayDevice::new(1 << 20, name, name, String::new()))
        };
        let killed = Users::begin(&state, [7; 16], &[primary("a"), primary("b")]);
        let boot = killed.expect("it can be written").boot;
        let listed = || {
            let text = state.read(&file_of([7; 16], KIND), BYTES_MAX).expect("it can be read");
            parse(&text.expect("it is there"), &boot).expect("it is whole").expect("it counts")
        };
        let users = Users::begin(&state, [7; 16], &[primary("a")]).expect("it can be written");
        assert_eq!(listed(), ["a", "b"].map(str::to_owned).into());
        users.end().expect("it can be written");
        assert!(listed().contains("b"), "it may arrive");
        let began = users.began.checked_sub(STRAGGLE_MAX).expect("the machine runs that long");
        Users { began, primaries: Vec::new(), ..users }.end().expect("it can be written");
        assert_eq!(state.read(&file_of([7; 16], KIND), BYTES_MAX).expect("it can be read"), None);
        std::fs::remove_dir_all(&dir).expect("it is ours");
    }

    #[test]
    fn a_list_that_is_not_text_is_replaced() {
        let dir = std::env::temp_dir().join(format!("forebay-users-{}", std::process::id()));
        let state = StateDir::open(&dir).expect("a directory can be made");
        let (own, other) = (file_of([7; 16], KIND), file_of([8; 16], KIND));
        for name in [&own, &other] {
            std::fs::write(dir.join(name), [0xff; 9]).expect("it can be written");
        }
        let away: Arc<dyn BlockDevice> =
            Arc::new(AwayDevice::new(1 << 20, "a", "a", String::new()));
        let primaries = [away];
        let users = Users::begin(&state, [7; 16], &primaries).expect("it can be replaced");
        assert_eq!(state.read(&other, BYTES_MAX).expect("it can be read"), None);
        assert!(primaries[0].has_stragglers(), "it may have been on the list");
        let boot = users.boot.clone();
        users.end().expect("it can be written");
        let left = state.read(&own, BYTES_MAX).expect("it can be read").expect("it stays");
        assert_eq!(parse(&left, &boot), Some(Some(["a".to_owned()].into())));
        std::fs::remove_dir_all(&dir).expect("it is ours");
    }
}
