//! The remembered events, and the thread that stores them and tells the consumers.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tokio::sync::broadcast;

use super::{Consumer, News, cut};
use crate::api::{Acknowledged, Event, Severity};
use crate::error::{ControlError, ControlErrorKind};

/// Most events remembered; the oldest go first.
const EVENTS_MAX: usize = 256;
/// How long an event is remembered: information, and the rest.
const KEEP_INFO: Duration = Duration::from_secs(7 * 86_400);
const KEEP: Duration = Duration::from_secs(30 * 86_400);
/// Most updates that a stream may be behind; it then begins again from the list.
const BEHIND_MAX: usize = 256;
/// Most bytes of an event's text; longer ones are cut.
const TEXT_BYTES_MAX: usize = 2048;
/// Most bytes of a stored event: its text, in which JSON makes six bytes of one at most, and names,
/// which are shorter.
const EVENT_BYTES_MAX: usize = 8 * TEXT_BYTES_MAX;
/// Most bytes of the text that an [`EventStore`] saves.
pub const STORED_BYTES_MAX: usize = EVENTS_MAX * EVENT_BYTES_MAX;
/// Most bytes of a consumer's name.
const NAME_BYTES_MAX: usize = 64;
/// Most consumers that are remembered for an event.
const NAMES_MAX: usize = 16;
/// How often events whose time is over are looked for.
const ROUND: Duration = Duration::from_secs(60);

/// Where events are kept over restarts.
pub trait EventStore: Send + Sync + 'static {
    /// The text that was saved last; `None` if there is none.
    ///
    /// # Errors
    /// If it cannot be read, or is damaged.
    fn load(&self) -> io::Result<Option<String>>;

    /// Saves a text, replacing the one before it whole.
    ///
    /// # Errors
    /// If it cannot be saved.
    fn save(&self, text: &str) -> io::Result<()>;
}

/// News for those who follow the events.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Update {
    /// An event has happened, perhaps again.
    Event(Event),
    /// Somebody has acknowledged an event.
    Acknowledged(Acknowledged),
}

/// The events of a server.
pub struct EventLog {
    state: Mutex<State>,
    changed: Condvar,
    updates: broadcast::Sender<Update>,
}

struct State {
    next: u64,
    /// Oldest first.
    events: VecDeque<Entry>,
    /// Updates that are not stored yet; at most [`EVENTS_MAX`].
    pending: VecDeque<Update>,
    dirty: bool,
}

/// An event as it is stored.
#[derive(Clone, Serialize, Deserialize)]
struct Entry {
    #[serde(flatten)]
    event: Event,
    #[serde(default)]
    subject: String,
}

/// The stored form.
#[derive(Serialize, Deserialize)]
struct Stored {
    next: u64,
    events: Vec<Entry>,
}

impl EventLog {
    /// The events that `store` has; a damaged store is reported as an event, and replaced. Starts
    /// the thread that stores them and tells `consumers`.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(
        store: Option<Box<dyn EventStore>>,
        consumers: Vec<Consumer>,
    ) -> io::Result<Arc<Self>> {
        let (stored, damage) = match store.as_ref().map_or(Ok(None), |store| load(&**store)) {
            Ok(stored) => (stored, None),
            Err(error) => (None, Some(error)),
        };
        // Without the old numbers, new ones must still be higher than those.
        let first = if damage.is_some() { unix_seconds() } else { 1 };
        let Stored { next, events } = stored.unwrap_or(Stored { next: first, events: Vec::new() });
        let state = State { next, events: events.into(), pending: VecDeque::new(), dirty: false };
        let (updates, _) = broadcast::channel(BEHIND_MAX);
        let log = Arc::new(Self { state: Mutex::new(state), changed: Condvar::new(), updates });
        if let Some(error) = damage {
            tracing::warn!(%error, "the previous events cannot be read; a new list begins");
            let text = format!("the previous events cannot be read: {error}");
            log.tell(News::new("events-lost", Severity::Warning, text, ""));
        }
        let kept = Arc::downgrade(&log);
        let thread = std::thread::Builder::new().name("events-store".to_owned());
        thread.spawn(move || keep(&kept, store.as_deref(), &consumers))?;
        Ok(log)
    }

    /// Takes a new event. One of the same kind, volume and subject is replaced.
    pub fn tell(&self, news: News) {
        let now = unix_seconds();
        let mut state = self.lock();
        let News { kind, severity, volume, subject, text, remedy } = news;
        let same = |entry: &Entry| {
            entry.event.kind == kind && entry.event.volume == volume && entry.subject == subject
        };
        let before = state.events.iter().position(same).and_then(|at| state.events.remove(at));
        let (count, first) =
            before.map_or((0, now), |before| (before.event.count, before.event.first_unix_seconds));
        let event = Event {
            id: state.next,
            kind: kind.to_owned(),
            severity,
            volume,
            text: cut(&text, TEXT_BYTES_MAX),
            remedy: remedy.to_owned(),
            first_unix_seconds: first,
            last_unix_seconds: now,
            count: count + 1,
            acknowledged: std::collections::BTreeMap::new(),
        };
        state.next += 1;
        state.events.push_back(Entry { event: event.clone(), subject });
        while state.events.len() > EVENTS_MAX {
            state.events.pop_front();
        }
        self.publish(state, Update::Event(event));
    }

    /// Acknowledges an event for the consumer `by`.
    ///
    /// # Errors
    /// When there is no such event, or the name cannot be used.
    pub fn acknowledge(&self, id: u64, by: &str) -> Result<Event, ControlError> {
        let usable = !by.is_empty() && by.len() <= NAME_BYTES_MAX;
        if !usable || by.chars().any(char::is_control) {
            let what = format!("{by:?} is not a name; use 1 to {NAME_BYTES_MAX} printable bytes");
            return Err(ControlError::new(ControlErrorKind::Invalid, what, "say who you are"));
        }
        let mut state = self.lock();
        let found = state.events.iter_mut().find(|entry| entry.event.id == id);
        let event = &mut found.ok_or_else(|| no_event(id))?.event;
        if event.acknowledged.contains_key(by) {
            return Ok(event.clone());
        }
        if event.acknowledged.len() >= NAMES_MAX {
            let what = format!("event {id} is acknowledged by {NAMES_MAX} consumers already");
            return Err(ControlError::new(ControlErrorKind::Conflict, what, "that is enough"));
        }
        event.acknowledged.insert(by.to_owned(), unix_seconds());
        let event = event.clone();
        self.publish(state, Update::Acknowledged(Acknowledged { id, by: by.to_owned() }));
        Ok(event)
    }

    /// The remembered events whose number is above `after`, oldest first. If `after` was never
    /// given out, all of them.
    #[must_use]
    pub fn list(&self, after: u64) -> Vec<Event> {
        self.list_from(after).1
    }

    /// The same, with the number after which the list begins: 0 instead of `after` if that was
    /// never given out.
    #[must_use]
    pub fn list_from(&self, after: u64) -> (u64, Vec<Event>) {
        let state = self.lock();
        let after = if after < state.next { after } else { 0 };
        let events = state.events.iter().map(|entry| &entry.event);
        (after, events.filter(|event| event.id > after).cloned().collect())
    }

    /// Everything from now on.
    #[must_use]
    pub fn follow(&self) -> broadcast::Receiver<Update> {
        self.updates.subscribe()
    }

    fn publish(&self, mut state: MutexGuard<'_, State>, update: Update) {
        if state.pending.len() >= EVENTS_MAX {
            state.pending.pop_front();
        }
        state.pending.push_back(update);
        state.dirty = true;
        self.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic cannot leave an event half-changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a change, and takes what has to be stored and told; both may be empty.
    fn wait(&self) -> (Option<String>, VecDeque<Update>) {
        let state = self.lock();
        let quiet = |state: &mut State| !state.dirty;
        let waited = self.changed.wait_timeout_while(state, ROUND, quiet);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let before = state.events.len();
        let now = unix_seconds();
        state.events.retain(|entry| !is_over(&entry.event, now));
        if !state.dirty && state.events.len() == before {
            return (None, VecDeque::new());
        }
        state.dirty = false;
        let events = state.events.iter().cloned().collect();
        let stored = Stored { next: state.next, events };
        let text = serde_json::to_string(&stored).ok();
        (text, std::mem::take(&mut state.pending))
    }
}

/// Stores events and tells the consumers, until the log is gone.
fn keep(log: &Weak<EventLog>, store: Option<&dyn EventStore>, consumers: &[Consumer]) {
    while let Some(log) = log.upgrade() {
        let (text, updates) = log.wait();
        if let (Some(store), Some(text)) = (store, text)
            && let Err(error) = store.save(&text)
        {
            tracing::warn!(%error, "events cannot be saved: a restart forgets the latest");
        }
        for update in updates {
            if let Update::Event(event) = &update {
                consumers.iter().for_each(|consumer| consumer.tell(event));
            }
            // Nobody may be following.
            let _ = log.updates.send(update);
        }
    }
}

fn load(store: &dyn EventStore) -> io::Result<Option<Stored>> {
    let Some(text) = store.load()? else { return Ok(None) };
    let mut stored: Stored = serde_json::from_str(&text).map_err(io::Error::other)?;
    let excess = stored.events.len().saturating_sub(EVENTS_MAX);
    stored.events.drain(..excess);
    for Entry { event, .. } in &mut stored.events {
        event.text = cut(&event.text, TEXT_BYTES_MAX);
    }
    let highest = stored.events.iter().map(|entry| entry.event.id).max().unwrap_or(0);
    if highest >= stored.next {
        return Err(io::Error::other(format!("event {highest} is not below {}", stored.next)));
    }
    Ok(Some(stored))
}

fn is_over(event: &Event, now: u64) -> bool {
    let keep = if event.severity == Severity::Info { KEEP_INFO } else { KEEP };
    now.saturating_sub(event.last_unix_seconds) > keep.as_secs()
}

fn no_event(id: u64) -> ControlError {
    let what = format!("there is no event {id}: it is over, or has happened again since");
    ControlError::new(ControlErrorKind::NotFound, what, "list them with `forebay events`")
}

/// The time, in seconds since 1970.
fn unix_seconds() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use forebay_block::NAME_BYTES_MAX as VOLUME_BYTES_MAX;

    use super::*;

    #[derive(Clone, Default)]
    struct Shelf(Arc<Mutex<Option<String>>>);

    impl EventStore for Shelf {
        fn load(&self) -> io::Result<Option<String>> {
            Ok(self.0.lock().expect("nobody panics with it").clone())
        }

        fn save(&self, text: &str) -> io::Result<()> {
            *self.0.lock().expect("nobody panics with it") = Some(text.to_owned());
            Ok(())
        }
    }

    fn start(shelf: &Shelf) -> Arc<EventLog> {
        EventLog::start(Some(Box::new(shelf.clone())), Vec::new()).expect("a thread can be had")
    }

    fn news(kind: &'static str, volume: &str) -> News {
        News::new(kind, Severity::Error, format!("{kind} happened"), "mend it").of(volume)
    }

    fn ids(log: &EventLog) -> Vec<(u64, u64)> {
        log.list(0).iter().map(|event| (event.id, event.count)).collect()
    }

    fn saved(shelf: &Shelf, word: &str) {
        for _ in 0..1000 {
            if shelf.load().expect("it can").is_some_and(|text| text.contains(word)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("{word} is not saved");
    }

    #[test]
    fn repetitions_become_one_event_that_nobody_has_acknowledged() {
        let log = start(&Shelf::default());
        log.tell(news("away", "a"));
        log.tell(news("away", "b"));
        log.acknowledge(1, "night").expect("it is there");
        log.acknowledge(1, "night").expect("twice is no harm");
        log.acknowledge(1, "day").expect("another one");
        let first = &log.list(0)[0];
        assert_eq!(first.acknowledged.keys().collect::<Vec<_>>(), ["day", "night"]);
        log.tell(news("away", "a"));
        assert_eq!(ids(&log), [(2, 1), (3, 2)]);
        assert!(log.list(0)[1].acknowledged.is_empty());
        assert_eq!(log.acknowledge(1, "day").expect_err("gone").kind, ControlErrorKind::NotFound);
        for name in ["", "a\nb", &"x".repeat(65)] {
            assert_eq!(log.acknowledge(2, name).expect_err(name).kind, ControlErrorKind::Invalid);
        }
        log.tell(news("set", "a").about("mode"));
        log.tell(news("set", "a").about("eviction"));
        assert_eq!(log.list(3).len(), 2, "another setting is another event");
        assert_eq!(log.list(99).len(), 4, "a number of another life");
        let begins = [2, 99].map(|after| log.list_from(after).0);
        assert_eq!(begins, [2, 0], "a stream goes on with what the list has not");
    }

    #[test]
    fn they_are_bounded() {
        let log = start(&Shelf::default());
        for number in 0..2 * EVENTS_MAX {
            log.tell(news("set", "a").about(&number.to_string()));
        }
        assert_eq!(log.list(0).len(), EVENTS_MAX);
        assert_eq!(log.list(0)[0].id, EVENTS_MAX as u64 + 1);
        for number in 0..NAMES_MAX {
            log.acknowledge(300, &number.to_string()).expect("there is room");
        }
        assert_eq!(log.acknowledge(300, "x").expect_err("no").kind, ControlErrorKind::Conflict);
    }

    /// Events of settings with very long values made a text that the next start refused.
    #[test]
    fn the_longest_events_are_read_back() {
        let (shelf, long) = (Shelf::default(), "\u{1}".repeat(8 << 10));
        let log = start(&shelf);
        for number in 0..EVENTS_MAX {
            let name = format!("{number:\"<VOLUME_BYTES_MAX$}");
            let one = News::new("set", Severity::Error, long.clone(), "mend it").about(&name);
            log.tell(one.of(&name));
        }
        for (event, by) in log.list(0).iter().flat_map(|e| (0..NAMES_MAX).map(move |by| (e, by))) {
            let by = format!("{by:\"<NAME_BYTES_MAX$}");
            log.acknowledge(event.id, &by).expect("there is room");
        }
        log.tell(news("last", "a"));
        saved(&shelf, "last happened");
        let stored = shelf.load().expect("it can").expect("it is saved");
        assert!(stored.len() <= STORED_BYTES_MAX, "{}", stored.len());
        assert_eq!(start(&shelf).list(0), log.list(0));
    }

    #[test]
    fn long_texts_are_cut_at_a_character() {
        assert_eq!(cut("short", 8), "short");
        assert_eq!(cut("\u{e4}\u{e4}\u{e4}\u{e4}\u{e4}", 9), "\u{e4} [...]");
    }

    #[test]
    fn a_restart_has_them_and_a_damaged_store_stops_nothing() {
        let shelf = Shelf::default();
        let log = start(&shelf);
        log.tell(news("away", "a"));
        log.acknowledge(1, "night").expect("it is there");
        saved(&shelf, "night");
        let again = start(&shelf);
        assert_eq!(again.list(0), log.list(0));
        again.tell(news("away", "a"));
        assert_eq!(ids(&again), [(2, 2)]);
        for damaged in ["", "{", "{\"next\":1,\"events\":[{}]}"] {
            shelf.save(damaged).expect("it can");
            let anew = start(&shelf).list(0);
            assert_eq!((anew.len(), anew[0].kind.as_str()), (1, "events-lost"));
            assert!(anew[0].id > 1_000_000, "above every number of before");
        }
    }

    #[test]
    fn old_events_go() {
        let shelf = Shelf::default();
        let log = start(&shelf);
        log.tell(news("away", "a"));
        log.tell(News::new("started", Severity::Info, "it started".to_owned(), ""));
        let events = log.list(0);
        let day = 86_400;
        let later = |event: &Event, days: u64| is_over(event, event.last_unix_seconds + days * day);
        assert_eq!([later(&events[0], 8), later(&events[0], 31)], [false, true]);
        assert_eq!([later(&events[1], 6), later(&events[1], 8)], [false, true]);
    }
}
