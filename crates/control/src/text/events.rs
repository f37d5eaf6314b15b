//! Events as text.

use crate::api::{Event, Severity};

const DAY: u64 = 86_400;

/// The events, oldest first.
#[must_use]
pub fn events(events: &[Event]) -> String {
    if events.is_empty() {
        return "no events\n".to_owned();
    }
    events.iter().map(event).collect()
}

/// An event in a few lines: its number, when, how much it matters, what, and what to do.
#[must_use]
pub fn event(event: &Event) -> String {
    let Event { id, kind, text, remedy, .. } = event;
    let severity = severity(event.severity);
    let volume = event.volume.as_ref().map_or(String::new(), |name| format!("volume {name}: "));
    let again = match event.count {
        1 => String::new(),
        count => format!(" ({count} times since {})", utc(event.first_unix_seconds)),
    };
    let mut out =
        format!("{id:>4}  {}  {severity:7}  {kind}{again}\n", utc(event.last_unix_seconds));
    out += &format!("      {volume}{text}\n");
    if !remedy.is_empty() {
        out += &format!("      {remedy}\n");
    }
    if !event.acknowledged.is_empty() {
        let names = event.acknowledged.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        out += &format!("      acknowledged by {names}\n");
    }
    out
}

/// The word for a severity.
#[must_use]
pub fn severity(severity: Severity) -> &'static str {
    match severity {
        Severity::Info => "info",
        Severity::Warning => "warning",
        Severity::Error => "error",
    }
}

/// A time given in seconds since 1970, as the date in UTC: 2026-01-31.
#[must_use]
pub fn date(unix_seconds: u64) -> String {
    utc(unix_seconds)[..10].to_owned()
}

/// A time given in seconds since 1970, as date and time of day, in UTC.
#[must_use]
pub fn utc(unix_seconds: u64) -> String {
    let (days, rest) = (unix_seconds / DAY, unix_seconds % DAY);
    // Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms": civil_from_days.
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest % 3600 / 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_date() {
        // `date -u -d @N +'%F %TZ'`
        let known = [
            (0, "1970-01-01 00:00:00Z"),
            (951_827_696, "2000-02-29 12:34:56Z"),
            (1_709_251_199, "2024-02-29 23:59:59Z"),
            (1_764_106_080, "2025-11-25 21:28:00Z"),
            (4_107_542_400, "2100-03-01 00:00:00Z"),
        ];
        for (seconds, text) in known {
            assert_eq!((utc(seconds).as_str(), date(seconds).as_str()), (text, &text[..10]));
        }
    }
}
