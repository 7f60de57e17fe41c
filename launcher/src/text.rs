//! Text for people: tables, and printing.

use std::ffi::OsString;
use std::io::{self, ErrorKind, Write};
use std::ops::Range;
use std::process::ExitCode;
use std::time::SystemTime;

use accelerator_host::machine::unix_time;
use serde::Serialize;

use crate::error::{Error, Result};

/// Prints `text`; a closed pipe is no error.
///
/// # Errors
/// When standard output cannot be written.
pub(crate) fn print(text: &str) -> Result<ExitCode> {
    let mut stdout = io::stdout().lock();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Error::system("standard output cannot be written").with_source(error))
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Formats `value` as JSON with a line break at its end.
pub(crate) fn json(value: &impl Serialize) -> Result<String> {
    let text = serde_json::to_string_pretty(value);
    let text = text.map_err(|error| Error::system("cannot write JSON").with_source(error))?;
    Ok(text + "\n")
}

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

/// A measured number in six digits: `0.0123457`, `1.5e-9`, `NaN`.
pub(crate) fn figure(value: f64) -> String {
    if !value.is_finite() {
        return value.to_string();
    }
    let scientific = format!("{value:.5e}");
    let Some((digits, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let trimmed = |text: &str| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text.to_owned(),
    };
    match exponent {
        -5..=5 => trimmed(&format!("{value:.*}", (5 - exponent) as usize)),
        6..15 if value.fract() == 0.0 => format!("{value}"),
        _ => format!("{}e{exponent}", trimmed(digits)),
    }
}

/// Text of a program, without what moves a terminal's cursor or ends a line of a table.
pub(crate) fn plain(text: &str) -> String {
    let escaped = |c: char| match c.is_control() {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    text.chars().map(escaped).collect()
}

/// The beginning of what may be long.
pub(crate) fn short(text: &str) -> String {
    const LONGEST: usize = 100;
    match text.char_indices().nth(LONGEST) {
        None => text.to_owned(),
        Some((at, _)) => format!("{}…", &text[..at]),
    }
}

/// Returns `text`; if it is longer than `bytes`, an ellipsis replaces the middle.
pub(crate) fn without_middle(text: &str, bytes: usize) -> String {
    if text.len() <= bytes {
        return text.to_owned();
    }
    let head = text.floor_char_boundary(bytes / 2);
    let tail = text.ceil_char_boundary(text.len() - bytes / 2);
    format!("{}…{}", &text[..head], &text[tail..])
}

/// Aligns `rows` in columns, two blanks apart.
pub(crate) fn columns(rows: &[impl AsRef<[String]>]) -> String {
    let mut widths = Vec::new();
    for row in rows {
        for (at, cell) in row.as_ref().iter().enumerate() {
            let width = cell.chars().count();
            match widths.get_mut(at) {
                Some(widest) => *widest = width.max(*widest),
                None => widths.push(width),
            }
        }
    }
    let mut text = String::new();
    for row in rows {
        let cells: Vec<String> = row
            .as_ref()
            .iter()
            .zip(&widths)
            .map(|(cell, &width)| format!("{cell:width$}"))
            .collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
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

/// `words`, quoted for a shell.
pub(crate) fn shell_line(words: &[OsString]) -> String {
    let quoted = words.iter().map(|word| {
        let word = word.to_string_lossy();
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@%^".contains(c);
        if !word.is_empty() && word.chars().all(is_plain) {
            word.into_owned()
        } else {
            format!("'{}'", word.replace('\'', r"'\''"))
        }
    });
    quoted.collect::<Vec<_>>().join(" ")
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
    fn columns_are_aligned() {
        let rows = [
            ["a".to_owned(), "b".to_owned()],
            ["long".to_owned(), "c".to_owned()],
        ];
        assert_eq!(columns(&rows), "a     b\nlong  c\n");
    }

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
    fn figures_have_six_digits() {
        for (value, text) in [
            (0.0, "0"),
            (0.1 + 0.2, "0.3"),
            (-1.0 / 3.0, "-0.333333"),
            (0.001_234_567_8, "0.00123457"),
            (1.5e-9, "1.5e-9"),
            (60_000.0, "60000"),
            (1_234_567.0, "1234567"),
            (1_234_567.8, "1.23457e6"),
            (1e300, "1e300"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(figure(value), text);
        }
    }

    #[test]
    fn names_cannot_move_the_cursor() {
        assert_eq!(plain("a\nb\u{1b}[2J é"), "a\\nb\\u{1b}[2J é");
    }

    #[test]
    fn a_long_text_loses_its_middle() {
        assert_eq!(without_middle("abcdef", 6), "abcdef");
        assert_eq!(without_middle("abcdefg", 6), "abc…efg");
        assert_eq!(without_middle("ééééé", 6), "é…é");
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

    #[test]
    fn a_command_line_can_be_given_to_a_shell() {
        let words = ["train", "--lr=1e-3", "two words", "", "it's", "$x"].map(OsString::from);
        assert_eq!(
            shell_line(&words),
            r"train --lr=1e-3 'two words' '' 'it'\''s' '$x'"
        );
    }
}
