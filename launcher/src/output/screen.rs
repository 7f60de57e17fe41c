//! Where the output of all ranks meets: whole lines, each with its rank in front.

use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

/// Who writes: the lines of different writers do not mix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writer {
    /// The launcher itself.
    Launcher,
    /// A stream of a rank, numbered.
    Stream(usize),
    /// Any rank, where output passes through as it comes.
    Raw,
}

/// How a screen parts a progress line (one that ends in a carriage return) from what follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parting {
    /// Erase it: the target is a terminal, and the writer will draw it again.
    Erase,
    /// End it with a newline.
    Newline,
}

/// A target of output, and whose unfinished line it shows.
///
/// Two streams that show on the same terminal share one screen.
#[derive(Debug)]
pub(crate) struct Screen {
    parting: Parting,
    state: Mutex<State>,
}

impl Screen {
    /// A screen on which nothing has been written.
    pub(crate) fn new(parting: Parting) -> Self {
        Self {
            parting,
            state: Mutex::new(State {
                open: None,
                scratch: Vec::new(),
            }),
        }
    }

    /// Writes `block` to `target` with `prefix` before every line, then flushes.
    ///
    /// A block may end within a line; the writer's next block continues it, unless another
    /// writer comes between: then the line is parted and begun again with its prefix.
    ///
    /// # Errors
    /// Those of `target`.
    pub(crate) fn write(
        &self,
        writer: Writer,
        prefix: &[u8],
        block: &[u8],
        target: &mut impl Write,
    ) -> io::Result<()> {
        if block.is_empty() {
            return Ok(());
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { open, scratch } = &mut *state;
        scratch.clear();
        let mut place = match *open {
            Some((owner, place)) if owner == writer => place,
            Some((_, place)) => {
                scratch.extend_from_slice(self.part(place));
                Place::Start
            }
            None => Place::Start,
        };
        for line in lines(block) {
            // The second half of a "\r\n" that was torn apart begins no line.
            if place == Place::Start || (place == Place::Return && line != b"\n") {
                scratch.extend_from_slice(prefix);
            }
            scratch.extend_from_slice(line);
            place = match line.last() {
                Some(b'\n') => Place::Start,
                Some(b'\r') => Place::Return,
                _ => Place::Within,
            };
        }
        *open = (place != Place::Start).then_some((writer, place));
        target.write_all(scratch)?;
        target.flush()
    }

    /// Ends an unfinished line of a prefixed stream; raw output stays as it is.
    ///
    /// # Errors
    /// Those of `target`.
    pub(crate) fn finish(&self, target: &mut impl Write) -> io::Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match state.open {
            None | Some((Writer::Raw, _)) => Ok(()),
            Some(_) => {
                state.open = None;
                target.write_all(b"\n")?;
                target.flush()
            }
        }
    }

    fn part(&self, place: Place) -> &'static [u8] {
        match (place, self.parting) {
            (Place::Return, Parting::Erase) => b"\x1b[2K",
            _ => b"\n",
        }
    }
}

#[derive(Debug)]
struct State {
    open: Option<(Writer, Place)>,
    scratch: Vec<u8>,
}

/// Where a writer's last block ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
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

#[cfg(test)]
mod tests {
    use super::*;

    const ZERO: Writer = Writer::Stream(0);
    const ONE: Writer = Writer::Stream(2);

    fn shown(parting: Parting, blocks: &[(Writer, &str, &str)]) -> String {
        let screen = Screen::new(parting);
        let mut target = Vec::new();
        for (writer, prefix, block) in blocks {
            screen
                .write(*writer, prefix.as_bytes(), block.as_bytes(), &mut target)
                .unwrap();
        }
        screen.finish(&mut target).unwrap();
        String::from_utf8(target).unwrap()
    }

    #[test]
    fn every_line_has_its_prefix() {
        let text = shown(
            Parting::Newline,
            &[(ZERO, "[0] ", "a\n\nb\n"), (ONE, "[1] ", "c\n")],
        );
        assert_eq!(text, "[0] a\n[0] \n[0] b\n[1] c\n");
    }

    #[test]
    fn an_unfinished_line_is_ended() {
        let text = shown(
            Parting::Newline,
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
                Parting::Newline,
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
            shown(Parting::Erase, &blocks),
            "[0] 10%\r[0] 20%\r\x1b[2K[1] x\n[0] 30%\n"
        );
        assert_eq!(
            shown(Parting::Newline, &blocks),
            "[0] 10%\r[0] 20%\r\n[1] x\n[0] 30%\n"
        );
    }

    #[test]
    fn torn_line_ends_stay_one() {
        assert_eq!(
            shown(
                Parting::Erase,
                &[(ZERO, "[0] ", "a\r"), (ZERO, "[0] ", "\nb\r\n")]
            ),
            "[0] a\r\n[0] b\r\n"
        );
    }

    #[test]
    fn raw_output_is_untouched_but_for_the_launchers_own_lines() {
        assert_eq!(
            shown(
                Parting::Erase,
                &[(Writer::Raw, "", "a\rb"), (Writer::Raw, "", "\0c")]
            ),
            "a\rb\0c"
        );
        let noted = shown(
            Parting::Erase,
            &[(Writer::Raw, "", "a"), (Writer::Launcher, "", "note\n")],
        );
        assert_eq!(noted, "a\nnote\n");
    }
}
