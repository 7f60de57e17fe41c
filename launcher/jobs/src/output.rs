//! Text for people: tables, ages, and printing.

use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

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

/// Says on standard error what does not end the command.
pub(crate) fn warn(text: &str) {
    // Standard error may be closed.
    let _ = writeln!(io::stderr(), "warning: {text}");
}

/// As JSON with a line break at its end.
pub(crate) fn json(value: &impl Serialize) -> Result<String> {
    let text = serde_json::to_string_pretty(value);
    let text = text.map_err(|error| Error::system("cannot write JSON").with_source(error))?;
    Ok(text + "\n")
}

/// Aligns `rows` in columns, two blanks apart.
pub(crate) fn columns<const N: usize>(rows: &[[String; N]]) -> String {
    let width = |at: usize| {
        rows.iter()
            .map(|row| row[at].chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |row: &[String; N]| {
        let cells: Vec<_> = row
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        cells.join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

/// A time as Arena shows ages: `57s`, `4m`, `14h`, `3d`.
pub(crate) fn age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..86_400 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// `words`, quoted for a shell.
pub(crate) fn shell_line<S: AsRef<str>>(words: &[S]) -> String {
    words
        .iter()
        .map(|word| shell_word(word.as_ref()))
        .collect::<Vec<_>>()
        .join(" ")
}

/// `word`, quoted for a shell where it has to be.
pub(crate) fn shell_word(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@%^".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let rows = [["a", "b"], ["long", "c"]].map(|row| row.map(str::to_owned));
        assert_eq!(columns(&rows), "a     b\nlong  c\n");
    }

    #[test]
    fn ages_are_short() {
        for (seconds, text) in [
            (0, "0s"),
            (59, "59s"),
            (60, "1m"),
            (7199, "1h"),
            (86_400 * 3, "3d"),
        ] {
            assert_eq!(age(seconds), text);
        }
    }

    #[test]
    fn words_are_quoted() {
        assert_eq!(
            shell_line(&["a b", "it's", "", "x=1"]),
            r"'a b' 'it'\''s' '' x=1"
        );
    }
}
