//! Lines of output: cuts a stream into blocks of whole lines, keeps the last ones, and writes those of all ranks under one
//! lock, prefixed with their rank.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Write};

use accelerator_host::sync::Mutex;

/// Beyond this many bytes without an end, a line is passed on in pieces.
const MAX_LINE: usize = 8 << 20;

/// Collects bytes and gives them back in whole lines.
///
/// A carriage return ends a line too, so that progress bars move.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    pending: Vec<u8>,
}

impl Lines {
    /// Adds `chunk` and passes all whole lines to `sink`, in one block.
    pub(crate) fn feed(&mut self, chunk: &[u8], sink: impl FnOnce(&[u8])) {
        let end = chunk
            .iter()
            .rposition(|byte| matches!(byte, b'\n' | b'\r'))
            .map(|at| at + 1);
        let Some(end) = end else {
            self.pending.extend_from_slice(chunk);
            if self.pending.len() >= MAX_LINE {
                self.rest(sink);
            }
            return;
        };
        if self.pending.is_empty() {
            sink(&chunk[..end]);
        } else {
            self.pending.extend_from_slice(&chunk[..end]);
            self.rest(sink);
        }
        self.pending.extend_from_slice(&chunk[end..]);
    }

    /// Passes the rest, a line without an end, to `sink`.
    pub(crate) fn rest(&mut self, sink: impl FnOnce(&[u8])) {
        if !self.pending.is_empty() {
            sink(&self.pending);
            self.pending.clear();
            // One long line should not hold its memory to the end of the job.
            self.pending.shrink_to(1 << 16);
        }
    }
}

/// The number of lines that are kept.
const LINES: usize = 5;

/// The number of lines over which the message of a panic may go, to keep its first one.
const PANIC_LINES: usize = 40;

/// The number of bytes kept from the beginning of a long line, where an error says what happened, and from its end,
/// where it names the remedy.
const HALF: usize = 2 << 10;

/// The last lines of a stream, bounded in number and width.
#[derive(Debug, Default)]
pub(super) struct LastLines {
    lines: VecDeque<KeptLine>,
    current: KeptLine,
    /// The number of lines since the last panic began.
    since_panic: usize,
}

impl LastLines {
    /// Takes in bytes of the stream.
    pub(super) fn feed(&mut self, chunk: &[u8]) {
        for &byte in chunk {
            match byte {
                b'\n' => self.end_line(),
                _ => self.current.push(byte),
            }
        }
    }

    /// The lines as text that can be shown anywhere.
    pub(super) fn text(&self) -> Vec<String> {
        let mut lines = self.lines.clone();
        if !self.current.bytes.is_empty() {
            self.make_room(&mut lines);
        }
        lines
            .iter()
            .chain(std::iter::once(&self.current))
            .map(KeptLine::text)
            .filter(|line| !line.trim().is_empty())
            .collect()
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.current);
        if line.bytes.iter().all(u8::is_ascii_whitespace) || is_backtrace(&line.bytes) {
            return;
        }
        self.since_panic = match line.is_panic() {
            true => 0,
            false => self.since_panic.saturating_add(1),
        };
        let mut lines = std::mem::take(&mut self.lines);
        self.make_room(&mut lines);
        lines.push_back(line);
        self.lines = lines;
    }

    /// Drops a line where one more would be too many: the oldest one, but of a panic with a message of many
    /// lines, where it was and the first line of the message stay.
    fn make_room(&self, lines: &mut VecDeque<KeptLine>) {
        if lines.len() < LINES {
            return;
        }
        let removed = match lines.iter().rposition(KeptLine::is_panic) {
            Some(0) if self.since_panic <= PANIC_LINES => 2,
            _ => 0,
        };
        lines.remove(removed);
    }
}

/// A line, without the middle if it is long.
#[derive(Clone, Debug, Default)]
struct KeptLine {
    bytes: Vec<u8>,
    is_cut: bool,
}

impl KeptLine {
    fn push(&mut self, byte: u8) {
        self.bytes.push(byte);
        if self.bytes.len() == 3 * HALF {
            self.bytes.drain(HALF..2 * HALF);
            self.is_cut = true;
        }
    }

    fn is_panic(&self) -> bool {
        is_panic(&String::from_utf8_lossy(&self.bytes))
    }

    /// Returns the line as printable text; an ellipsis replaces its middle.
    fn text(&self) -> String {
        let at = self.bytes.len().saturating_sub(HALF);
        if !self.is_cut && at <= HALF {
            return plain(&self.bytes);
        }
        let (head, tail) = (&self.bytes[..HALF], self.bytes[at..].trim_ascii_end());
        let end = plain(tail);
        match tail.contains(&b'\r') {
            true => end,
            // The cut may be within a character.
            false => format!(
                "{}…{}",
                plain(head).trim_end_matches('\u{fffd}'),
                end.trim_start_matches('\u{fffd}')
            ),
        }
    }
}

/// The most informative of a rank's last lines: the first of a panic's message, or the last one.
pub(crate) fn headline(lines: &[String]) -> Option<&String> {
    let panic = lines.iter().rposition(|line| is_panic(line));
    panic
        .and_then(|at| lines.get(at + 1))
        .or_else(|| lines.last())
}

/// Returns `true` if Rust prints this line before a panic's message.
fn is_panic(line: &str) -> bool {
    line.starts_with("thread '") && line.contains(" panicked at ")
}

/// Returns `true` if a line belongs to the backtrace that Rust prints after a panic's message, which is what
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
    anstream::adapter::strip_str(shown).to_string()
}

/// The source of a block of output: lines of different sources do not mix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Launcher,
    /// A stream of a rank, numbered.
    Stream(usize),
    /// Any rank, while output passes through as it comes.
    Raw,
}

/// The separator of a progress line (one that ends in a carriage return) from the next source's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Separator {
    /// Erase it: the target is a terminal, and its source draws it again.
    Erase,
    /// End it with a newline.
    Newline,
}

/// Serializes writes to a target, and knows which source has an unfinished line on it.
///
/// Two streams of one terminal share a writer.
#[derive(Debug)]
pub(super) struct SharedWriter {
    separator: Separator,
    state: Mutex<State>,
}

impl SharedWriter {
    /// A writer to which nothing has been written.
    pub(super) fn new(separator: Separator) -> Self {
        Self {
            separator,
            state: Mutex::new(State {
                open: None,
                scratch: Vec::new(),
            }),
        }
    }

    /// Writes `block` to `target` with `prefix` before every line, then flushes.
    ///
    /// A block may end within a line; the next block of the same source continues it. A block of another source
    /// in between ends the line, and the continuation starts a new line with its prefix.
    pub(super) fn write(
        &self,
        source: Source,
        prefix: &[u8],
        block: &[u8],
        target: &mut impl Write,
    ) -> io::Result<()> {
        if block.is_empty() {
            return Ok(());
        }
        let mut state = self.state.lock();
        let State { open, scratch } = &mut *state;
        scratch.clear();
        let mut line_state = match *open {
            Some((owner, state)) if owner == source => state,
            Some((_, state)) => {
                scratch.extend_from_slice(self.separator(state));
                LineState::Start
            }
            None => LineState::Start,
        };
        for line in lines(block) {
            // The second half of a "\r\n" that was torn apart begins no line.
            if line_state == LineState::Start || (line_state == LineState::Return && line != b"\n")
            {
                scratch.extend_from_slice(prefix);
            }
            scratch.extend_from_slice(line);
            line_state = match line.last() {
                Some(b'\n') => LineState::Start,
                Some(b'\r') => LineState::Return,
                _ => LineState::Within,
            };
        }
        *open = (line_state != LineState::Start).then_some((source, line_state));
        target.write_all(scratch)?;
        target.flush()
    }

    /// Ends an unfinished line of a prefixed stream; raw output stays as it is.
    pub(super) fn finish(&self, target: &mut impl Write) -> io::Result<()> {
        let mut state = self.state.lock();
        match state.open {
            None | Some((Source::Raw, _)) => Ok(()),
            Some(_) => {
                state.open = None;
                target.write_all(b"\n")?;
                target.flush()
            }
        }
    }

    fn separator(&self, state: LineState) -> &'static [u8] {
        match (state, self.separator) {
            (LineState::Return, Separator::Erase) => b"\x1b[2K",
            _ => b"\n",
        }
    }
}

#[derive(Debug)]
struct State {
    open: Option<(Source, LineState)>,
    scratch: Vec<u8>,
}

/// The place in a line at which the last block ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LineState {
    Start,
    Return,
    Within,
}

/// The pieces of `block`, each with its terminator: `\n`, `\r\n`, or `\r` alone.
fn lines(block: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = block;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let end = match rest.iter().position(|byte| matches!(byte, b'\n' | b'\r')) {
            None => rest.len(),
            Some(at) if rest[at] == b'\r' && rest.get(at + 1) == Some(&b'\n') => at + 2,
            Some(at) => at + 1,
        };
        let (line, tail) = rest.split_at(end);
        rest = tail;
        Some(line)
    })
}

/// A writer that waits while a non-blocking target is full.
pub(super) struct BlockingWriter<W>(pub(crate) W);

impl<W: Write + std::os::fd::AsFd> Write for BlockingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match self.0.write(bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.wait()?,
                result => return result,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        loop {
            match self.0.flush() {
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.wait()?,
                result => return result,
            }
        }
    }
}

impl<W: Write + std::os::fd::AsFd> BlockingWriter<W> {
    fn wait(&self) -> io::Result<()> {
        use rustix::event::{PollFd, PollFlags, poll};
        match poll(&mut [PollFd::new(&self.0, PollFlags::OUT)], None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(chunks: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut lines = Lines::default();
        let mut blocks = Vec::new();
        for chunk in chunks {
            lines.feed(chunk, |block| blocks.push(block.to_vec()));
        }
        lines.rest(|block| blocks.push(block.to_vec()));
        blocks
    }

    #[test]
    fn gives_whole_lines() {
        assert_eq!(
            blocks(&[b"a\nb", b"c", b"d\ne\n", b"f"]),
            [&b"a\n"[..], b"bcd\ne\n", b"f"]
        );
        assert_eq!(blocks(&[b"1%\r2", b"%\r"]), [&b"1%\r"[..], b"2%\r"]);
        assert!(blocks(&[b""]).is_empty());
    }

    #[test]
    fn any_bytes_come_out_as_they_went_in() {
        let bytes: Vec<u8> = (0..100_000_u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
            .collect();
        let chunks: Vec<&[u8]> = bytes.chunks(977).collect();
        assert_eq!(blocks(&chunks).concat(), bytes);
    }

    #[test]
    fn a_line_without_end_is_passed_on_in_pieces() {
        let long = vec![b'x'; MAX_LINE + 10];
        let given = blocks(&long.chunks(1 << 16).collect::<Vec<_>>());
        assert!(given.len() > 1);
        assert_eq!(given.concat(), long);
    }

    fn text(bytes: &[u8]) -> Vec<String> {
        let mut last_lines = LastLines::default();
        for chunk in bytes.chunks(3) {
            last_lines.feed(chunk);
        }
        last_lines.text()
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
        // A line that only looks like it stays.
        assert_eq!(text(b"12: done\n  at noon\n"), ["12: done"]);
    }

    #[test]
    fn a_long_panic_keeps_where_it_was_and_its_first_line() {
        let first =
            "thread 'main' (71) panicked at src/main.rs:3:5:\n=== Tensor Operation Error ===\n";
        let message = "  Operation: 'Matmul'\n  Reason:\n    1. The dimensions differ.\n       Left [2].\n       Right [3].\n";
        assert_eq!(
            text(format!("step 7\n{first}{message}").as_bytes()),
            [
                "thread 'main' (71) panicked at src/main.rs:3:5:",
                "=== Tensor Operation Error ===",
                "    1. The dimensions differ.",
                "       Left [2].",
                "       Right [3]."
            ]
        );
        // One that the program survived gives way to the next one, and to what is written later.
        let second = "thread 'main' (71) panicked at src/main.rs:9:9:\nno such digit\n";
        let said = text(format!("{first}{message}{second}").as_bytes());
        assert_eq!(said[3..], second.lines().collect::<Vec<_>>());
        let later: String = (0..100).map(|step| format!("step {step}\n")).collect();
        let said = text(format!("{first}{message}{later}").as_bytes());
        assert_eq!(said[0], "step 95");
    }

    #[test]
    fn the_headline_is_the_first_line_of_a_panic() {
        let said =
            |text: &str| headline(&text.lines().map(str::to_owned).collect::<Vec<_>>()).cloned();
        let panic = "thread 'main' (71) panicked at src/main.rs:3:5:\nassertion `left == right` failed: \
                     matmul: dtype mismatch\n  left: F32\n right: BF16";
        assert_eq!(
            said(panic).unwrap(),
            "assertion `left == right` failed: matmul: dtype mismatch"
        );
        assert_eq!(
            said("step 7\nError: no such file").unwrap(),
            "Error: no such file"
        );
        assert_eq!(said(""), None);
    }

    #[test]
    fn the_last_lines_are_plain_text_and_bounded() {
        assert_eq!(text(b"1\n2\n\n3\n4\n5\n6\n7"), ["3", "4", "5", "6", "7"]);
        assert_eq!(text(b"1\n2\n"), ["1", "2"]);
        assert!(text(b"").is_empty());
        let long = text(&vec![b'x'; 1_000_000]);
        assert_eq!((long.len(), long[0].chars().count()), (1, 2 * HALF + 1));
        assert_eq!(
            text(b"\x1b[1;31merror\x1b[0m: \xff\x07x\r\n"),
            ["error: \u{fffd}x"]
        );
        assert_eq!(text(b"10%\r20%\r30%\n"), ["30%"]);
    }

    #[test]
    fn a_long_line_keeps_what_happened_and_what_to_do() {
        let whole = format!("no such file: {}; pass --data", "é".repeat(1000));
        assert_eq!(text(whole.as_bytes()), [whole]);
        for (count, end) in [(3000, ""), (3001, "\n"), (90_000, "\r\n")] {
            let line = format!("no such file: {}; pass --data{end}", "é".repeat(count));
            let said = text(line.as_bytes()).pop().unwrap();
            assert!(said.starts_with("no such file: éé"), "{said}");
            assert!(said.ends_with("éé; pass --data"), "{said}");
            assert!(said.contains("é…é") && !said.contains('\u{fffd}'), "{said}");
        }
        // A progress bar without end shows its last update.
        let bar: String = (0..9000).map(|step| format!("\rstep {step}")).collect();
        assert_eq!(text(bar.as_bytes()), ["step 8999"]);
    }

    const ZERO: Source = Source::Stream(0);
    const ONE: Source = Source::Stream(2);

    fn shown(separator: Separator, blocks: &[(Source, &str, &str)]) -> String {
        let writer = SharedWriter::new(separator);
        let mut target = Vec::new();
        for (source, prefix, block) in blocks {
            writer
                .write(*source, prefix.as_bytes(), block.as_bytes(), &mut target)
                .unwrap();
        }
        writer.finish(&mut target).unwrap();
        String::from_utf8(target).unwrap()
    }

    #[test]
    fn lines_have_prefixes_and_an_unfinished_one_is_ended_by_another_rank() {
        use Separator::{Erase, Newline};
        type Pieces<'a> = &'a [(Source, &'a str, &'a str)];

        let progress = [
            (ZERO, "[0] ", "10%\r"),
            (ZERO, "[0] ", "20%\r"),
            (ONE, "[1] ", "x\n"),
            (ZERO, "[0] ", "30%\n"),
        ];
        let cases: [(Separator, Pieces<'_>, &str); 8] = [
            (
                Newline,
                &[(ZERO, "[0] ", "a\n\nb\n"), (ONE, "[1] ", "c\n")],
                "[0] a\n[0] \n[0] b\n[1] c\n",
            ),
            (
                Newline,
                &[
                    (ZERO, "[0] ", "a"),
                    (ONE, "[1] ", "b\n"),
                    (ZERO, "[0] ", "c"),
                ],
                "[0] a\n[1] b\n[0] c\n",
            ),
            // Nobody interrupts it.
            (
                Newline,
                &[(ZERO, "[0] ", "a"), (ZERO, "[0] ", "b\nc\n")],
                "[0] ab\n[0] c\n",
            ),
            (
                Erase,
                &progress,
                "[0] 10%\r[0] 20%\r\x1b[2K[1] x\n[0] 30%\n",
            ),
            (Newline, &progress, "[0] 10%\r[0] 20%\r\n[1] x\n[0] 30%\n"),
            // The end of a line comes in two pieces.
            (
                Erase,
                &[(ZERO, "[0] ", "a\r"), (ZERO, "[0] ", "\nb\r\n")],
                "[0] a\r\n[0] b\r\n",
            ),
            (
                Erase,
                &[(Source::Raw, "", "a\rb"), (Source::Raw, "", "\0c")],
                "a\rb\0c",
            ),
            (
                Erase,
                &[(Source::Raw, "", "a"), (Source::Launcher, "", "note\n")],
                "a\nnote\n",
            ),
        ];
        for (separator, blocks, text) in cases {
            assert_eq!(shown(separator, blocks), text);
        }
    }
}
