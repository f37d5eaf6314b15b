//! What a flush waits for, and what it tells.

use super::*;
use crate::api::Mode;
use crate::request::tests::Bed;
use crate::testing::VOLUME;
use crate::testing::rooms::{Rooms, content, key};

#[test]
fn a_flush_of_a_cache_without_writes_is_answered_at_once() {
    let mut bed = Bed::new();
    let id = bed.flush();
    assert_eq!(bed.answered(), [(id, None)]);
}

#[test]
fn a_flush_waits_until_the_records_of_answered_writes_are_durable() {
    let mut bed = Bed::new();
    bed.write(5, &content(5));
    bed.log_written();
    bed.answered();
    let id = bed.flush();
    assert!(bed.answered().is_empty());
    bed.device_flushed();
    assert_eq!(bed.answered(), [(id, None)]);
    let id = bed.flush();
    assert_eq!(bed.answered(), [(id, None)], "all is durable already");
}

#[test]
fn a_flush_does_not_wait_for_writes_that_are_not_answered() {
    let mut bed = Bed::new();
    bed.write(5, &content(5));
    bed.close();
    let id = bed.flush();
    assert_eq!(bed.answered(), [(id, None)]);
}

#[test]
fn a_flush_waits_for_the_primary_only_after_direct_changes() {
    let mut bed = Bed::new();
    bed.rooms.volume_mut(VOLUME).direct += 1;
    let id = bed.flush();
    assert!(bed.answered().is_empty());
    bed.primary_flushed(&Ok(()));
    assert_eq!(bed.answered(), [(id, None)]);
    let id = bed.flush();
    assert_eq!(bed.answered(), [(id, None)]);
}

#[test]
fn a_flush_waits_for_what_was_destaged_only_where_the_primary_has_to_be_complete() {
    let mut bed = Bed::new();
    bed.rooms.volume_mut(VOLUME).written.push(Id(7));
    let id = bed.flush();
    assert_eq!(bed.answered(), [(id, None)], "the log has it durably");
    bed.rooms.set_mode(VOLUME, Mode::WriteThrough);
    bed.flush();
    assert!(bed.answered().is_empty());
}

#[test]
fn a_failed_part_of_a_flush_answers_at_once_and_the_rest_says_nothing() {
    let mut bed = Bed::new();
    bed.write(5, &content(5));
    bed.log_written();
    bed.answered();
    bed.rooms.volume_mut(VOLUME).direct += 1;
    let id = bed.flush();
    bed.primary_flushed(&Err(ErrorKind::Media.into()));
    assert_eq!(bed.answered(), [(id, Some(ErrorKind::Media))]);
    assert_eq!((bed.requests.len(), bed.requests.unanswered()), (1, 0));
    bed.device_flushed();
    assert!(bed.answered().is_empty());
    assert_eq!((bed.requests.len(), bed.requests.unanswered()), (0, 0));
}

#[test]
fn the_error_of_the_last_part_fails_the_flush() {
    let mut bed = Bed::new();
    bed.write(5, &content(5));
    bed.log_written();
    bed.answered();
    bed.rooms.volume_mut(VOLUME).direct += 1;
    let id = bed.flush();
    bed.device_flushed();
    assert!(bed.answered().is_empty());
    bed.primary_flushed(&Err(ErrorKind::Media.into()));
    assert_eq!(bed.answered(), [(id, Some(ErrorKind::Media))]);
    assert_eq!((bed.requests.len(), bed.requests.unanswered()), (0, 0));
}

#[test]
fn a_flush_waits_for_dirty_blocks_from_before_a_change_of_mode() {
    let mut bed = Bed::new();
    bed.rooms.dirty_durable([5, 6]);
    bed.rooms.set_mode(VOLUME, Mode::WriteThrough);
    let id = bed.flush();
    let leftover = |bed: &mut Bed| {
        let Rooms { cache, fx, .. } = &mut bed.rooms;
        bed.requests.pump_leftover(cache, fx);
        bed.answered()
    };
    assert_eq!(leftover(&mut bed), []);
    bed.rooms.forget(5);
    assert_eq!(leftover(&mut bed), []);
    // The other one cannot be read back: nobody waits for it.
    assert!(bed.rooms.contents.fence(key(6)));
    assert_eq!(leftover(&mut bed), [(id, None)]);
}

#[test]
fn a_change_of_mode_takes_no_longer_with_many_dirty_blocks() {
    let mut bed = Bed::new();
    let stripes = 15;
    for stripe in 0..stripes {
        bed.rooms.dirty_durable([stripe * 256, stripe * 256 + 9]);
    }
    bed.rooms.set_mode(VOLUME, Mode::WriteThrough);
    let kept = bed.rooms.volume(VOLUME).leftover.expect("there are some");
    assert_eq!(kept.from.1, 0, "nothing was looked at");
    let now = bed.rooms.now;
    bed.rooms.now = now + std::time::Duration::from_secs(1);
    bed.rooms.dirty_durable([15 * 256]);
    let id = bed.flush();
    (0..stripes).for_each(|stripe| bed.rooms.forget(stripe * 256));
    let Rooms { cache, fx, .. } = &mut bed.rooms;
    bed.requests.pump_leftover(cache, fx);
    assert_eq!(bed.answered(), []);
    // What cannot be read back is passed for good, and what is newer does not count.
    for stripe in 0..stripes {
        assert!(bed.rooms.contents.fence(key(stripe * 256 + 9)));
    }
    let Rooms { cache, fx, .. } = &mut bed.rooms;
    bed.requests.pump_leftover(cache, fx);
    assert_eq!(bed.answered(), [(id, None)]);
    assert!(!bed.rooms.has_leftover(VOLUME));
    bed.rooms.set_mode(VOLUME, Mode::WriteBack);
    assert!(bed.rooms.volume(VOLUME).leftover.is_none());
}

#[test]
fn a_stop_fails_flushes_that_wait_for_dirty_blocks_from_before_a_change_of_mode() {
    let mut bed = Bed::new();
    bed.rooms.dirty_durable([5]);
    bed.rooms.set_mode(VOLUME, Mode::WriteThrough);
    let id = bed.flush();
    let Rooms { cache, fx, .. } = &mut bed.rooms;
    bed.requests.give_up_leftover(cache, fx);
    assert_eq!(bed.answered(), [(id, Some(ErrorKind::ShuttingDown))]);
}

#[test]
fn a_loss_fails_the_flushes_that_wait_and_the_first_that_begins_afterwards() {
    let mut bed = Bed::new();
    bed.write(5, &content(5));
    bed.log_written();
    bed.answered();
    let before = bed.flush();
    bed.rooms.volume_mut(VOLUME).losses.note(ErrorKind::Corrupt.into());
    let after = bed.flush();
    bed.device_flushed();
    let corrupt = Some(ErrorKind::Corrupt);
    assert_eq!(bed.answered(), [(before, corrupt), (after, corrupt)]);
    let id = bed.flush();
    assert_eq!(bed.answered(), [(id, None)]);
}

#[test]
fn a_flush_of_a_failed_cache_device_waits_for_the_stripes_that_are_being_detached() {
    let mut bed = Bed::new();
    bed.rooms.dirty([5]);
    bed.rooms.set_health(Health::Draining);
    let id = bed.flush();
    let [Note::FlushDetached(VOLUME, op)] = bed.notes[..] else { panic!("{:?}", bed.notes) };
    assert!(bed.answered().is_empty());
    let Rooms { cache, fx, .. } = &mut bed.rooms;
    bed.requests.flush_part_done(cache, op, Ok(()), fx);
    assert_eq!(bed.answered(), [(id, None)]);
}
