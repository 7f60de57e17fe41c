//! Text for people: tables, ages and printing, and the last lines of files that may still be written.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::thread;
use std::time::Duration;

use accelerator_host::cli::{Error, Result};
pub(crate) use accelerator_host::cli::{json, print};
pub(crate) use accelerator_host::text::{columns, shell_line};

/// Prints a warning on standard error.
pub(crate) fn warn(text: &str) {
    // Standard error may be closed.
    let _ = writeln!(io::stderr(), "warning: {text}");
}

/// Formats an age as Arena does: `57s`, `4m`, `14h`, `3d`.
pub(crate) fn age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..86_400 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// Returns the seconds since 1970.
pub(crate) fn now() -> u64 {
    accelerator_host::machine::unix_time().as_secs()
}

/// The interval at which a file that is still written is polled.
const POLL: Duration = Duration::from_millis(50);

/// Writes the last `tail` lines of a file, or all of it. A file that does not exist yet has none.
pub(crate) fn copy_tail(path: &Path, tail: Option<usize>, output: &mut dyn Write) -> Result<()> {
    follow(path, tail, output, || true)
}

/// Does the same, and then copies the text that is appended until `is_over` returns true.
pub(crate) fn follow(
    path: &Path,
    tail: Option<usize>,
    output: &mut dyn Write,
    is_over: impl Fn() -> bool,
) -> Result<()> {
    let failed = |error: io::Error| {
        Error::system(format!("{} cannot be shown", path.display())).with_source(error)
    };
    let mut file = loop {
        // Asked first, so that the last bytes written are read.
        let over = is_over();
        match File::open(path) {
            Ok(file) => break file,
            Err(error) if error.kind() == io::ErrorKind::NotFound && over => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => thread::sleep(POLL),
            Err(error) => return Err(failed(error)),
        }
    };
    if let Some(lines) = tail {
        seek_to_tail(&mut file, lines).map_err(failed)?;
    }
    loop {
        let over = is_over();
        io::copy(&mut file, output)
            .and_then(|_| output.flush())
            .map_err(failed)?;
        if over {
            return Ok(());
        }
        thread::sleep(POLL);
    }
}

/// Returns the last lines of a file.
pub(crate) fn last_lines(path: &Path, lines: usize) -> Result<Vec<String>> {
    let mut text = Vec::new();
    copy_tail(path, Some(lines), &mut text)?;
    Ok(String::from_utf8_lossy(&text)
        .lines()
        .map(str::to_owned)
        .collect())
}

/// Returns the last `lines` lines of a text.
#[cfg(any(feature = "kubernetes", feature = "ray"))]
pub(crate) fn tail_of(text: &str, lines: usize) -> &str {
    let all: Vec<_> = text.split_inclusive('\n').collect();
    let skipped = all.len().saturating_sub(lines);
    let begin: usize = all[..skipped].iter().map(|line| line.len()).sum();
    &text[begin..]
}

/// Seeks to the beginning of the last `lines` lines.
fn seek_to_tail(file: &mut File, lines: usize) -> io::Result<()> {
    const BLOCK: u64 = 64 * 1024;
    let mut at = file.seek(SeekFrom::End(0))?;
    let (mut found, mut is_last_byte) = (0, true);
    while at > 0 {
        let begin = at.saturating_sub(BLOCK);
        file.seek(SeekFrom::Start(begin))?;
        let mut block = Vec::new();
        Read::take(&mut *file, at - begin).read_to_end(&mut block)?;
        for (offset, byte) in block.iter().enumerate().rev() {
            // A line break at the end of the file belongs to the last line.
            if *byte == b'\n' && !is_last_byte {
                found += 1;
                if found == lines {
                    file.seek(SeekFrom::Start(begin + offset as u64 + 1))?;
                    return Ok(());
                }
            }
            is_last_byte = false;
        }
        at = begin;
    }
    let begin = if lines == 0 {
        SeekFrom::End(0)
    } else {
        SeekFrom::Start(0)
    };
    file.seek(begin)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

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
    fn the_last_lines_are_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let long = "x".repeat(100_000);
        std::fs::write(&path, format!("a\n{long}\nb\nc\n")).unwrap();
        let tail = |lines| {
            let mut shown = Vec::new();
            copy_tail(&path, lines, &mut shown).unwrap();
            String::from_utf8(shown).unwrap()
        };
        assert_eq!(tail(Some(2)), "b\nc\n");
        assert_eq!(tail(Some(3)), format!("{long}\nb\nc\n"));
        assert_eq!(tail(Some(9)), format!("a\n{long}\nb\nc\n"));
        assert_eq!(tail(None), format!("a\n{long}\nb\nc\n"));
    }

    #[test]
    fn what_is_written_later_is_shown_too() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let rounds = std::cell::Cell::new(0);
        let mut shown = Vec::new();
        follow(&path, None, &mut shown, || {
            let round = rounds.replace(rounds.get() + 1);
            let mut file = File::options()
                .create(true)
                .append(true)
                .open(&path)
                .unwrap();
            writeln!(file, "{round}").unwrap();
            round == 2
        })
        .unwrap();
        assert_eq!(String::from_utf8(shown).unwrap(), "0\n1\n2\n");
    }

    #[cfg(any(feature = "kubernetes", feature = "ray"))]
    #[test]
    fn tails_are_lines() {
        assert_eq!(tail_of("a\nb\nc", 2), "b\nc");
        assert_eq!(tail_of("a\nb\n", 1), "b\n");
        assert_eq!(tail_of("a\n", 5), "a\n");
        assert_eq!(tail_of("a\n", 0), "");
    }
}
