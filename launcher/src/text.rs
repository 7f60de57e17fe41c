//! Text for people: tables, and printing.

use std::ffi::OsString;
use std::io::{self, ErrorKind, Write};
use std::ops::Range;
use std::process::ExitCode;
use std::time::SystemTime;

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

/// As JSON with a line break at its end.
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

/// Aligns `rows` in columns, two blanks apart.
pub(crate) fn columns<const N: usize>(rows: &[[String; N]]) -> String {
    let mut widths = [0; N];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in rows {
        let cells: Vec<String> = row
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell:width$}"))
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

/// The name of this host.
pub(crate) fn host_name() -> String {
    let system = rustix::system::uname();
    system.nodename().to_string_lossy().into_owned()
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
