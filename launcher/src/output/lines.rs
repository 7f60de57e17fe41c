//! Cutting a stream of bytes into blocks of whole lines.

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
}
