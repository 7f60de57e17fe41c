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
        if line.iter().all(u8::is_ascii_whitespace) {
            return;
        }
        if self.lines.len() == LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }
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
