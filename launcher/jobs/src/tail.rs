//! The output of a file that may still be written.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::thread;
use std::time::Duration;

use crate::error::{Error, Result};

/// How often a file is looked at that is still written.
const POLL: Duration = Duration::from_millis(50);

/// Writes the last `tail` lines of a file, or all of it. One that is not there yet has none.
///
/// # Errors
/// When it cannot be read, or `output` not written.
pub(crate) fn copy_tail(path: &Path, tail: Option<usize>, output: &mut dyn Write) -> Result<()> {
    follow(path, tail, output, || true)
}

/// The same, and what is written to the file until `is_over` says that it is complete.
///
/// # Errors
/// When it cannot be read, or `output` not written.
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
        // Asked first, so that what the last of its writers wrote is read.
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

/// The last lines of a file.
///
/// # Errors
/// When it cannot be read.
pub(crate) fn last_lines(path: &Path, lines: usize) -> Result<Vec<String>> {
    let mut text = Vec::new();
    copy_tail(path, Some(lines), &mut text)?;
    Ok(String::from_utf8_lossy(&text)
        .lines()
        .map(str::to_owned)
        .collect())
}

/// Moves to the beginning of the last `lines` lines.
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
            // The break at the very end closes the last line.
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
}
