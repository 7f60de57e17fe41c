//! The lock under which the output of all ranks is written: whole lines, prefixed with their rank.

use std::io::{self, ErrorKind, Write};

use accelerator_host::sync::Mutex;

/// The source of a block of output: lines of different sources do not mix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The launcher itself.
    Launcher,
    /// A stream of a rank, numbered.
    Stream(usize),
    /// Any rank, while output passes through as it comes.
    Raw,
}

/// The separator of a progress line (one that ends in a carriage return) from the next source's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Separator {
    /// Erase it: the target is a terminal, and its source draws it again.
    Erase,
    /// End it with a newline.
    Newline,
}

/// Serializes writes to a target, and knows which source has an unfinished line on it.
///
/// Two streams of one terminal share a writer.
#[derive(Debug)]
pub(crate) struct SharedWriter {
    separator: Separator,
    state: Mutex<State>,
}

impl SharedWriter {
    /// A writer to which nothing has been written.
    pub(crate) fn new(separator: Separator) -> Self {
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
    ///
    /// # Errors
    /// Those of `target`.
    pub(crate) fn write(
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
    ///
    /// # Errors
    /// Those of `target`.
    pub(crate) fn finish(&self, target: &mut impl Write) -> io::Result<()> {
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
pub(crate) struct BlockingWriter<W>(pub(crate) W);

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
    fn every_line_has_its_prefix() {
        let text = shown(
            Separator::Newline,
            &[(ZERO, "[0] ", "a\n\nb\n"), (ONE, "[1] ", "c\n")],
        );
        assert_eq!(text, "[0] a\n[0] \n[0] b\n[1] c\n");
    }

    #[test]
    fn an_unfinished_line_is_ended() {
        let text = shown(
            Separator::Newline,
            &[
                (ZERO, "[0] ", "a"),
                (ONE, "[1] ", "b\n"),
                (ZERO, "[0] ", "c"),
            ],
        );
        assert_eq!(text, "[0] a\n[1] b\n[0] c\n");
    }

    #[test]
    fn an_unfinished_line_goes_on_when_nobody_interrupts() {
        assert_eq!(
            shown(
                Separator::Newline,
                &[(ZERO, "[0] ", "a"), (ZERO, "[0] ", "b\nc\n")]
            ),
            "[0] ab\n[0] c\n"
        );
    }

    #[test]
    fn progress_lines_keep_their_prefix() {
        let blocks = [
            (ZERO, "[0] ", "10%\r"),
            (ZERO, "[0] ", "20%\r"),
            (ONE, "[1] ", "x\n"),
            (ZERO, "[0] ", "30%\n"),
        ];
        assert_eq!(
            shown(Separator::Erase, &blocks),
            "[0] 10%\r[0] 20%\r\x1b[2K[1] x\n[0] 30%\n"
        );
        assert_eq!(
            shown(Separator::Newline, &blocks),
            "[0] 10%\r[0] 20%\r\n[1] x\n[0] 30%\n"
        );
    }

    #[test]
    fn split_line_ends_stay_one() {
        assert_eq!(
            shown(
                Separator::Erase,
                &[(ZERO, "[0] ", "a\r"), (ZERO, "[0] ", "\nb\r\n")]
            ),
            "[0] a\r\n[0] b\r\n"
        );
    }

    #[test]
    fn raw_output_is_untouched_but_for_the_launchers_own_lines() {
        assert_eq!(
            shown(
                Separator::Erase,
                &[(Source::Raw, "", "a\rb"), (Source::Raw, "", "\0c")]
            ),
            "a\rb\0c"
        );
        let noted = shown(
            Separator::Erase,
            &[(Source::Raw, "", "a"), (Source::Launcher, "", "note\n")],
        );
        assert_eq!(noted, "a\nnote\n");
    }
}
