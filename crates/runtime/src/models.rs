//! Models of the state that threads share, which loom runs in every order that the memory model
//! allows: mailboxes with real wakers, and the devices' flush gates. Run by `tools/loom`.

use std::sync::Arc;

use forebay_block::VolumeId;
use forebay_block::{Completion, DeviceInfo, ErrorKind, Instant, Io, IoBuf, IoOp, IoQueue, IoTag};
use forebay_device::Alarm;
use forebay_engine::{Request, RequestId, Target};
use forebay_volume::Coming;
use loom::sync::Mutex;
use loom::thread;

use crate::devices::{Devices, Gates, gates};
use crate::mailbox::Mailbox;
use crate::message::Message;

/// One more preemption finds nothing new in these models, and takes ten times as long.
fn model(run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(run);
}

/// Two senders, and an owner that arms its waker while they send, and sleeps whenever it finds no
/// message.
#[test]
fn model_no_message_is_slept_over() {
    model(|| {
        let mailbox = Arc::new(Mailbox::default());
        let senders = [0, 1].map(|sender| {
            let mailbox = Arc::clone(&mailbox);
            thread::spawn(move || mailbox.send(&mut vec![sender]))
        });
        let (mut alarm, waker) = Alarm::new().expect("a model's");
        mailbox.own(waker);
        let (mut found, mut taken) = (Vec::new(), Vec::new());
        while found.len() < 2 {
            mailbox.take(&mut taken);
            if taken.is_empty() {
                alarm.sleep();
            }
            found.append(&mut taken);
        }
        found.sort_unstable();
        assert_eq!(found, [0, 1]);
        senders.into_iter().for_each(|sender| sender.join().expect("it ends"));
    });
}

/// A device whose queues are flushed separately, like connections. It fails one flush.
#[derive(Default)]
struct Disk {
    /// For each queue, writes that have completed but are not durable.
    volatile: [u32; 2],
    /// For each queue, writes that are durable.
    durable: [u32; 2],
    fails: bool,
}

/// A queue of the device, which completes everything at once.
struct Queue {
    own: usize,
    disk: Arc<Mutex<Disk>>,
    info: DeviceInfo,
    done: Vec<Completion>,
}

impl IoQueue for Queue {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn submit(&mut self, _: Instant, io: Io) -> Result<(), Io> {
        let mut disk = self.disk.lock().expect("nobody panics with it");
        let result = match io.op {
            IoOp::Flush if std::mem::take(&mut disk.fails) => {
                disk.volatile = [0; 2];
                Err(ErrorKind::Media.into())
            }
            IoOp::Flush => {
                disk.durable[self.own] += std::mem::take(&mut disk.volatile[self.own]);
                Ok(())
            }
            _ => {
                disk.volatile[self.own] += 1;
                Ok(())
            }
        };
        self.done.push(io.complete(result));
        Ok(())
    }

    fn poll(&mut self, _: Instant, done: &mut Vec<Completion>) {
        done.append(&mut self.done);
    }
}

/// A shard that makes one write, and one flush after it.
struct Shard {
    own: usize,
    devices: Devices,
    mailboxes: Arc<[Mailbox<Message>; 2]>,
    alarm: Alarm,
    written: bool,
    /// Whether the flush succeeded, once it has ended.
    flushed: Option<bool>,
    /// Whether it was told of a failed flush before its own write was flushed.
    told: bool,
    /// Whether the other shard no longer needs it.
    alone: bool,
    /// The clients' flushes on their way, if the first shard sends one to the other.
    coming: Option<Coming>,
    /// Number of flushes of clients that it has read.
    read: u64,
}

const WRITE: IoTag = IoTag(1);
const FLUSH: IoTag = IoTag(2);
/// Stands for the message that a shard no longer needs the other one.
const ENOUGH: IoTag = IoTag(3);

impl Shard {
    fn new(
        own: usize,
        disk: &Arc<Mutex<Disk>>,
        gates: &Gates,
        mailboxes: &Arc<[Mailbox<Message>; 2]>,
        sends: bool,
    ) -> Self {
        let queue = Queue { own, disk: Arc::clone(disk), info: info(), done: Vec::new() };
        let queues = vec![(Target::Cache, Box::new(queue) as Box<dyn IoQueue>)];
        let devices = Devices::over(queues, (own, gates.clone()));
        let (alarm, waker) = Alarm::new().expect("a model's");
        mailboxes[own].own(waker);
        let mailboxes = Arc::clone(mailboxes);
        let (written, flushed, told, alone, read) = (false, None, false, false, 0);
        let coming = sends.then(|| gates.coming.clone());
        Self { own, devices, mailboxes, alarm, written, flushed, told, alone, coming, read }
    }

    /// Runs to the end; returns whether its write was promised to be durable.
    fn run(mut self) -> bool {
        let now = Instant::default();
        self.devices.submit(now, Target::Cache, Io::write(WRITE, 0, IoBuf::zeroed(512)));
        let mut inbox = Vec::new();
        loop {
            self.turn(now);
            let waited_for = self.own == 1 && self.coming.is_some() && self.read == 0;
            if self.flushed.is_some() && self.alone && !waited_for {
                return self.flushed == Some(true) && !self.told;
            }
            self.mailboxes[self.own].take(&mut inbox);
            if inbox.is_empty() {
                self.alarm.sleep();
            }
            let read = self.read;
            for message in inbox.drain(..) {
                self.hear(now, message);
            }
            if self.read > read {
                let mut outgoing = [Vec::new(), Vec::new()];
                self.devices.seen(now, self.read - read, &mut outgoing);
                self.send(&mut outgoing);
            }
        }
    }

    fn send(&self, outgoing: &mut [Vec<Message>; 2]) {
        for (mailbox, messages) in self.mailboxes.iter().zip(outgoing) {
            mailbox.send(messages);
        }
    }

    /// Polls its device until there are no more completions.
    fn turn(&mut self, now: Instant) {
        let mut outgoing = [Vec::new(), Vec::new()];
        loop {
            let mut done = Vec::new();
            self.devices.poll(now, &mut outgoing, |_, completion| done.push(completion));
            if done.is_empty() {
                break;
            }
            for completion in done {
                self.ended(now, &completion, &mut outgoing);
            }
        }
        self.send(&mut outgoing);
    }

    fn ended(&mut self, now: Instant, done: &Completion, outgoing: &mut [Vec<Message>; 2]) {
        if done.tag == WRITE {
            self.written = true;
            if let (0, Some(coming)) = (self.own, &self.coming) {
                coming.send(1);
                let flush = Request::flush(RequestId(0), VolumeId(0));
                outgoing[1].push(Message::Request(flush));
            }
            self.devices.submit(now, Target::Cache, Io::flush(FLUSH));
            return;
        }
        assert_eq!(done.tag, FLUSH);
        self.flushed = Some(done.result.is_ok());
        outgoing[1 - self.own].push(Message::Flushed(Target::Cache, ENOUGH, Ok(())));
    }

    fn hear(&mut self, now: Instant, message: Message) {
        match message {
            Message::Flushed(_, ENOUGH, _) => self.alone = true,
            Message::Flushed(target, tag, result) => {
                let done = self.devices.flushed(target, tag, result);
                let mut outgoing = [Vec::new(), Vec::new()];
                self.ended(now, &done, &mut outgoing);
                self.send(&mut outgoing);
            }
            Message::Request(_) => self.read += 1,
            Message::SendFlush(target) => self.devices.send_flush(now, target),
            Message::FlushFailed(target, _) => {
                self.told |= self.written && self.flushed.is_none();
                self.devices.told(target);
            }
            _ => unreachable!("nothing else is sent"),
        }
    }
}

fn info() -> DeviceInfo {
    DeviceInfo { flush_by_queue: true, ..DeviceInfo::plain(1 << 20, "model") }
}

/// Runs two shards of one device. `fails`: the device fails the first flush, and loses everything
/// that both had written before it. `sends`: a client of the first flushes as well, and rounds wait
/// until the second has heard of it.
fn two_shards(fails: bool, sends: bool) {
    let disk = Arc::new(Mutex::new(Disk { fails, ..Disk::default() }));
    let gates = gates([info()].iter(), 2);
    let mailboxes = Arc::new([Mailbox::default(), Mailbox::default()]);
    let (theirs, shared, boxes) = (Arc::clone(&disk), gates.clone(), Arc::clone(&mailboxes));
    let other = thread::spawn(move || Shard::new(1, &theirs, &shared, &boxes, sends).run());
    let mine = Shard::new(0, &disk, &gates, &mailboxes, sends).run();
    let promised = [mine, other.join().expect("it ends")];
    let durable = disk.lock().expect("nobody panics with it").durable;
    for (promised, durable) in promised.into_iter().zip(durable) {
        assert!(!promised || durable == 1, "a flush ended well, and what it covers is gone");
    }
    assert!(fails || promised == [true, true]);
}

#[test]
fn model_a_flush_that_ends_well_covers_what_its_shard_had_written() {
    model(|| two_shards(false, false));
}

#[test]
fn model_a_flush_that_fails_is_everybodys_until_they_know() {
    model(|| two_shards(true, false));
}

#[test]
fn model_a_round_that_waits_for_a_shard_begins_when_it_has_heard() {
    model(|| two_shards(false, true));
}
