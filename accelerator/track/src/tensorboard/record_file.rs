//! Files of records with checksums, TensorFlow's `TFRecord`.

use std::io::{self, BufWriter, Write};

/// Writes records: the length, its checksum, the data, its checksum; all little-endian.
#[derive(Debug)]
pub(super) struct RecordFile<W: Write>(BufWriter<W>);

impl<W: Write> RecordFile<W> {
    pub(super) fn new(file: W) -> Self {
        Self(BufWriter::with_capacity(1 << 16, file))
    }

    pub(super) fn write(&mut self, data: &[u8]) -> io::Result<()> {
        let length = (data.len() as u64).to_le_bytes();
        self.0.write_all(&length)?;
        self.0.write_all(&masked_checksum(&length))?;
        self.0.write_all(data)?;
        self.0.write_all(&masked_checksum(data))
    }

    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// CRC-32C, masked since a checksum of data that hold checksums is a poor one.
fn masked_checksum(data: &[u8]) -> [u8; 4] {
    crc32c::crc32c(data)
        .rotate_right(15)
        .wrapping_add(0xa282_ead8)
        .to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_framed_as_tensorflow_frames_them() {
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
        let mut bytes = Vec::new();
        let mut file = RecordFile::new(&mut bytes);
        file.write(b"\x09\0\0\0\x40\xfc\x54\xd9\x41\x1a\x0dbrain.Event:2")
            .unwrap();
        file.flush().unwrap();
        drop(file);
        let expected = b"\x18\0\0\0\0\0\0\0\xa3\x7f\x4b\x22\
            \x09\0\0\0\x40\xfc\x54\xd9\x41\x1a\x0dbrain.Event:2\xec\xed\x8f\x9d";
        assert_eq!(bytes, expected);
    }
}
