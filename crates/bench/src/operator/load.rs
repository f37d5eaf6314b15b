//! The clients' work: one client for each volume, one request at a time, so that the order of all
//! requests is known.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail};

use super::client::{Answer, Client, Trouble};
use super::model::{BLOCK, How, is_zeros};
use super::volume::{Notice, Volume};
use forebay_block::testing::Numbers;

/// Maximum number of blocks in a request.
const LONGEST: u64 = 24;
/// Pause after an error.
const PAUSE: Duration = Duration::from_millis(20);
/// Modes in which the primary alone is complete after a FLUSH.
const DIRECT: [&str; 3] = ["write-through", "write-around", "pass-through"];
/// Modes in which writes are logged.
const LOGGING: [&str; 3] = ["write-back", "write-only", "write-through"];

/// Signals of the operator to all clients.
#[derive(Default)]
pub struct Signs {
    /// Flush and stop.
    pub end: AtomicBool,
    /// The server is about to end.
    pub going: AtomicBool,
    /// Something is wrong: stop at once.
    pub broken: AtomicBool,
}

/// The totals of a client.
#[derive(Default, Debug, Clone, Copy)]
pub struct Done {
    /// Requests that succeeded.
    pub good: u64,
    /// Requests that failed when failures were allowed.
    pub bad: u64,
}

/// A client of one volume.
struct Worker<'a> {
    volume: &'a mut Volume,
    client: Client,
    numbers: Numbers,
    /// Number of losses that the model has been told of.
    losses: u64,
    done: Done,
}

/// Uses a volume until told to stop, or the server ends.
pub fn run(
    volume: &mut Volume,
    socket: &Path,
    signs: &Signs,
    numbers: Numbers,
) -> anyhow::Result<Done> {
    let name = volume.name.clone();
    let losses = volume.losses();
    let client = match Client::connect(socket, &name) {
        Ok(client) => client,
        Err(_) if signs.going.load(Ordering::SeqCst) => return Ok(Done::default()),
        Err(trouble) => bail!("volume {name}: a client cannot connect: {trouble}"),
    };
    let mut worker = Worker { volume, client, numbers, losses, done: Done::default() };
    let outcome = worker.all(signs).with_context(|| format!("volume {name}"));
    // The next client hears of later losses only.
    worker.hear();
    if outcome.is_err() {
        signs.broken.store(true, Ordering::SeqCst);
    }
    outcome.map(|()| worker.done)
}

impl Worker<'_> {
    fn all(&mut self, signs: &Signs) -> anyhow::Result<()> {
        while !signs.end.load(Ordering::SeqCst) && !signs.broken.load(Ordering::SeqCst) {
            let outcome = match self.numbers.below(100) {
                0..50 => self.write()?,
                50..85 => self.read()?,
                85..97 => self.flush()?,
                _ => {
                    std::thread::sleep(Duration::from_millis(self.numbers.below(30)));
                    Ok(())
                }
            };
            if !self.judge(outcome, signs)? {
                return Ok(());
            }
        }
        if signs.going.load(Ordering::SeqCst) {
            return Ok(());
        }
        let outcome = self.flush()?;
        self.judge(outcome, signs).map(drop)
    }

    /// Evaluates the outcome of a request. Returns whether to continue.
    fn judge(&mut self, outcome: Answer<()>, signs: &Signs) -> anyhow::Result<bool> {
        let going = signs.going.load(Ordering::SeqCst);
        match outcome {
            Ok(()) => self.done.good += 1,
            Err(Trouble::Gone(_)) if going => return Ok(false),
            // A server that stops in order refuses late requests.
            Err(Trouble::Refused(_)) if going => self.done.bad += 1,
            Err(Trouble::Refused(error)) => {
                let allowed = self.volume.notice.failed();
                allowed.with_context(|| format!("a request got the error {error}"))?;
                self.done.bad += 1;
                std::thread::sleep(PAUSE);
            }
            Err(trouble) => bail!("{trouble}, though nobody ended the server"),
        }
        Ok(true)
    }

    fn place(&mut self) -> (u64, u64) {
        let blocks = self.volume.model.len();
        let longest = if self.numbers.below(4) == 0 { LONGEST } else { 3 };
        let count = 1 + self.numbers.below(longest);
        // Three of four requests go to an eighth of the volume; a few to one of its ends.
        let from = match self.numbers.below(32) {
            0 => 0,
            1 => blocks - count,
            2..24 => self.numbers.below(blocks / 8 - count),
            _ => self.numbers.below(blocks - count),
        };
        (from, count)
    }

    fn write(&mut self) -> anyhow::Result<Answer<()>> {
        let (from, count) = self.place();
        let version = self.volume.model.version();
        let bytes = self.volume.model.bytes(from, count, version);
        let fua = self.numbers.below(12) == 0;
        let before = self.volume.notice.mode();
        self.hear();
        self.volume.model.writing(from, count, version);
        let offset = from * BLOCK as u64;
        let outcome = if is_zeros(version) && !fua {
            self.client.zero(offset, bytes.len())
        } else {
            self.client.write(offset, &bytes, fua)
        };
        if outcome.is_ok() {
            let how = self.how(before, is_zeros(version));
            self.volume.model.written(from, count, how);
            if fua {
                self.volume.model.durable(from, count);
            }
        }
        // A primary may lose a write right after acknowledging it.
        self.hear();
        Ok(outcome)
    }

    /// The guarantees of a write that was sent when the mode was `before`.
    fn how(&self, before: (Option<String>, u64), zeros: bool) -> How {
        let same = before == self.volume.notice.mode();
        let Some(mode) = before.0.filter(|_| same) else { return How::default() };
        let logs = LOGGING.contains(&mode.as_str()) && self.volume.threshold == "0" && !zeros;
        How { direct: DIRECT.contains(&mode.as_str()), logged: logs }
    }

    fn read(&mut self) -> anyhow::Result<Answer<()>> {
        let (from, count) = self.place();
        let mut found = vec![0; count as usize * BLOCK];
        let outcome = self.client.read(from * BLOCK as u64, &mut found);
        self.hear();
        if outcome.is_ok() {
            self.volume.model.check_all(from, &found).context("a read")?;
        }
        Ok(outcome)
    }

    fn flush(&mut self) -> anyhow::Result<Answer<()>> {
        let before = self.volume.notice.mode();
        let outcome = self.client.flush();
        self.hear();
        match &outcome {
            Ok(()) => {
                let direct = self.how(before, false).direct;
                self.volume.model.flushed(direct);
                self.volume.notice.succeeded();
            }
            Err(Trouble::Refused(_)) => self.volume.model.lost(),
            Err(_) => {}
        }
        Ok(outcome)
    }

    /// Tells the model about new losses.
    fn hear(&mut self) {
        let losses = self.volume.losses();
        if losses != self.losses {
            self.losses = losses;
            self.volume.model.slipped();
        }
    }
}

/// Reads and compares the whole volume while it is not in use.
pub fn verify(volume: &Volume, socket: &Path) -> anyhow::Result<()> {
    let name = &volume.name;
    let wrong = |trouble: Trouble| anyhow::anyhow!("volume {name}: {trouble}, without a fault");
    let mut client = Client::connect(socket, name).map_err(wrong)?;
    const STEP: u64 = 64;
    let mut found = vec![0; STEP as usize * BLOCK];
    let mut from = 0;
    while from < volume.model.len() {
        match client.read(from * BLOCK as u64, &mut found) {
            Ok(()) => {
                let outcome = volume.model.check_all(from, &found);
                outcome.with_context(|| format!("all of volume {name}"))?;
                from += STEP;
            }
            Err(Trouble::Refused(_)) if may_fail(&volume.notice) => std::thread::sleep(PAUSE),
            Err(trouble) => return Err(wrong(trouble)),
        }
    }
    Ok(())
}

/// Whether errors are allowed because of a fault that is about to end.
fn may_fail(notice: &Notice) -> bool {
    notice.is_troubled() && notice.failed().is_ok()
}
