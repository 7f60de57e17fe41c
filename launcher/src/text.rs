//! Text for people: amounts, ranks, times, and notes on standard error.

use std::io::{self, Write};
use std::ops::Range;
use std::time::SystemTime;

use accelerator_host::machine::unix_time;

pub(crate) use accelerator_host::cli::{json, print};
pub(crate) use accelerator_host::text::{
    columns, figure, plain, shell_line, shell_word, without_middle,
};

/// `1.5 MiB`.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut amount = bytes as f64 / 1024.0;
    let mut units = UNITS.into_iter();
    let mut unit = units.next().unwrap_or_default();
    for larger in units {
        if amount < 1023.95 {
            break;
        }
        amount /= 1024.0;
        unit = larger;
    }
    format!("{amount:.1} {unit}")
}

/// `3 min`: whole units of the largest that fits.
pub(crate) fn duration(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..86_400 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

/// Returns the age in seconds of a time in seconds since 1970; 0 for a time from a clock that is ahead.
pub(crate) fn age(created: u64) -> u64 {
    unix_time().as_secs().saturating_sub(created)
}

/// Returns the beginning of a text that may be long.
pub(crate) fn short(text: &str) -> String {
    const LONGEST: usize = 100;
    match text.char_indices().nth(LONGEST) {
        None => text.to_owned(),
        Some((at, _)) => format!("{}…", &text[..at]),
    }
}

/// "rank 1", or "ranks 0, 2".
pub(crate) fn list<'a>(ranks: impl IntoIterator<Item = &'a usize>) -> String {
    let numbers: Vec<String> = ranks.into_iter().map(usize::to_string).collect();
    let noun = if numbers.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", numbers.join(", "))
}

/// "rank 1", "ranks 2 and 3", or "ranks 8 to 15": ranks that follow one another.
pub(crate) fn span(ranks: &Range<usize>) -> String {
    let Range { start, end } = ranks;
    match ranks.len() {
        0 => "no rank".to_owned(),
        1 => format!("rank {start}"),
        2 => format!("ranks {start} and {}", end - 1),
        _ => format!("ranks {start} to {}", end - 1),
    }
}

/// Writes lines of the launcher's own to standard error, where no output of ranks is.
pub(crate) fn note(text: &str) {
    let lines: String = text
        .lines()
        .map(|line| format!("accel-launch: {line}\n"))
        .collect();
    // Standard error may be closed.
    let _ = io::stderr().write_all(lines.as_bytes());
}

/// The newest version of the C library that a loader says is missing: `GLIBC_2.38`.
pub(crate) fn needed_glibc(said: &str) -> Option<&str> {
    let versions = said.match_indices("GLIBC_").map(|(at, _)| {
        let version = &said[at..];
        let end = version.find(|one: char| !one.is_ascii_alphanumeric() && !"_.".contains(one));
        &version[..end.unwrap_or(version.len())]
    });
    versions.max_by_key(|version| {
        let numbers = version["GLIBC_".len()..].split('.');
        let numbers = numbers.map(|number| number.parse().unwrap_or(0));
        numbers.collect::<Vec<u32>>()
    })
}

/// A time as text, in UTC and to the second: `2026-03-01T12:00:00Z`.
pub(crate) fn utc(time: SystemTime) -> String {
    humantime::format_rfc3339_seconds(time).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_short() {
        for (seconds, text) in [
            (0, "0 s"),
            (59, "59 s"),
            (60, "1 min"),
            (7199, "1 h"),
            (86_400 * 3, "3 d"),
        ] {
            assert_eq!(duration(seconds), text);
        }
    }

    #[test]
    fn amounts_are_short() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            (1 << 20, "1.0 MiB"),
            ((1 << 20) - 1, "1.0 MiB"),
            (400 << 20, "400.0 MiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }

    #[test]
    fn ranks_that_follow_one_another_are_a_span() {
        let shown = [3..3, 3..4, 3..5, 3..7].map(|ranks| span(&ranks));
        let expected = ["no rank", "rank 3", "ranks 3 and 4", "ranks 3 to 6"];
        assert_eq!(shown, expected);
    }

    #[test]
    fn the_newest_version_of_the_c_library_is_found() {
        let said =
            "version `GLIBC_2.4' not found\nversion `GLIBC_2.38' not found (required by GLIBC_2.9)";
        assert_eq!(needed_glibc(said), Some("GLIBC_2.38"));
        assert_eq!(
            needed_glibc("GLIBC_2.3.4' or GLIBC_2.3"),
            Some("GLIBC_2.3.4")
        );
        assert_eq!(needed_glibc("libx.so.1 => not found"), None);
    }
}
