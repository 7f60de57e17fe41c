//! The last lines that a rank wrote to its standard error.

use std::collections::VecDeque;

/// How many lines are kept.
const LINES: usize = 5;

/// How many bytes of a line are kept.
const WIDTH: usize = 400;

/// The last lines of a stream, bounded in number and width.
#[derive(Debug, Default)]
pub(crate) struct Tail {
    lines: VecDeque<Vec<u8>>,
    current: Vec<u8>,
}

impl Tail {
    /// Takes in what the stream brings.
    pub(crate) fn feed(&mut self, chunk: &[u8]) {
        for &byte in chunk {
            match byte {
                b'\n' => self.end_line(),
                _ if self.current.len() < WIDTH => self.current.push(byte),
                // A progress bar's updates come without end; the last one counts.
                b'\r' => self.current.clear(),
                _ => {}
            }
        }
    }

    /// The lines as text that can be shown anywhere.
    pub(crate) fn text(&self) -> Vec<String> {
        let skip = (self.lines.len() + usize::from(!self.current.is_empty())).saturating_sub(LINES);
        let all = self.lines.iter().chain(std::iter::once(&self.current));
        all.skip(skip)
            .map(|line| plain(line))
            .filter(|line| !line.trim().is_empty())
            .collect()
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.current);
        if line.iter().all(u8::is_ascii_whitespace) || is_backtrace(&line) {
            return;
        }
        if self.lines.len() == LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }
}

/// Whether a line belongs to the backtrace that Rust prints after a panic's message, which is what
/// the last lines are kept for.
fn is_backtrace(line: &[u8]) -> bool {
    let text = String::from_utf8_lossy(line);
    let inner = text.trim();
    let number = inner.split(':').next().unwrap_or_default();
    let frame = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    inner == "stack backtrace:"
        || inner.starts_with("note: run with `RUST_BACKTRACE")
        || inner.starts_with("note: Some details are omitted, run with `RUST_BACKTRACE")
        || text.starts_with(' ') && (frame && inner.contains(": ") || inner.starts_with("at "))
}

/// `line` without colours and control characters, and only the last of its progress updates.
fn plain(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(line);
    let text = text.trim_end();
    let shown = text.rsplit('\r').next().unwrap_or(text);
    let mut out = String::with_capacity(shown.len());
    let mut characters = shown.chars().peekable();
    while let Some(character) = characters.next() {
        if character == '\x1b' {
            // A control sequence runs from "[" to a letter.
            if characters.next_if_eq(&'[').is_some() {
                let _ = characters.by_ref().find(|c| ('@'..='~').contains(c));
            }
        } else if character == '\t' || !character.is_control() {
            out.push(character);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(bytes: &[u8]) -> Vec<String> {
        let mut tail = Tail::default();
        for chunk in bytes.chunks(3) {
            tail.feed(chunk);
        }
        tail.text()
    }

    #[test]
    fn a_panic_is_not_pushed_out_by_its_backtrace() {
        let mut said = "thread 'main' panicked at src/main.rs:3:5:\nno such digit: 10\nstack \
                        backtrace:\n"
            .to_owned();
        for frame in 0..20 {
            said.push_str(&format!(
                "  {frame:2}: train::step\n             at ./src/main.rs:3:5\n"
            ));
        }
        said.push_str(
            "note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace\n",
        );
        assert_eq!(
            text(said.as_bytes()),
            [
                "thread 'main' panicked at src/main.rs:3:5:",
                "no such digit: 10"
            ]
        );
        // What only looks like it stays.
        assert_eq!(text(b"12: done\n  at noon\n"), ["12: done"]);
    }

    #[test]
    fn keeps_the_last_lines() {
        assert_eq!(text(b"1\n2\n\n3\n4\n5\n6\n7"), ["3", "4", "5", "6", "7"]);
        assert_eq!(text(b"1\n2\n"), ["1", "2"]);
        assert!(text(b"").is_empty());
    }

    #[test]
    fn shows_plain_text() {
        assert_eq!(
            text(b"\x1b[1;31merror\x1b[0m: \xff\x07x\r\n"),
            ["error: \u{fffd}x"]
        );
        assert_eq!(text(b"10%\r20%\r30%\n"), ["30%"]);
    }

    #[test]
    fn is_bounded() {
        let lines = text(&vec![b'x'; 1_000_000]);
        assert_eq!(lines.len(), 1);
        assert_eq!(lines[0].len(), WIDTH);
    }
}
