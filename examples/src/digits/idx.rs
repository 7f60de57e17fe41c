//! The IDX format of MNIST: a magic number (two zero bytes, the type of the elements, the number of dimensions), each
//! dimension as a big-endian 32-bit number, then the elements.

use core::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::path::Path;

use flate2::bufread::GzDecoder;

use super::{CLASSES, PIXELS, SIDE};
use crate::error::{Error, Kind, Result};

/// The first bytes of a gzip file.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Reads the grey values of all images of a file, which may be gzipped.
pub(super) fn images(path: &Path) -> Result<Vec<u8>> {
    Source {
        path,
        content: Content::Images,
    }
    .read()
}

/// Reads the labels of a file, which may be gzipped.
pub(super) fn labels(path: &Path) -> Result<Vec<u8>> {
    let source = Source {
        path,
        content: Content::Labels,
    };
    let labels = source.read()?;
    match labels
        .iter()
        .position(|&label| usize::from(label) >= CLASSES)
    {
        None => Ok(labels),
        Some(at) => Err(source.error(format!(
            "has {} as label number {at}; expected a digit from 0 to 9: use a set with ten \
             classes",
            labels[at]
        ))),
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Content {
    Images,
    Labels,
}

impl Content {
    fn magic(self) -> [u8; 4] {
        match self {
            Self::Images => [0, 0, 8, 3],
            Self::Labels => [0, 0, 8, 1],
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Images => "images",
            Self::Labels => "labels",
        }
    }

    /// The number of bytes of a sample.
    fn size(self) -> u64 {
        match self {
            Self::Images => PIXELS as u64,
            Self::Labels => 1,
        }
    }
}

/// A file and its expected content.
struct Source<'a> {
    path: &'a Path,
    content: Content,
}

impl Source<'_> {
    fn read(&self) -> Result<Vec<u8>> {
        let file = File::open(self.path).map_err(|error| self.io(error))?;
        let mut file = BufReader::new(file);
        // The name of a file does not tell its format: some programs unpack a file and keep its name.
        let start = file.fill_buf().map_err(|error| self.io(error))?;
        if !start.starts_with(&GZIP) {
            let samples = self.samples(&mut file)?;
            self.at_end(&mut file)?;
            return Ok(samples);
        }
        let mut unpacked = GzDecoder::new(file);
        let samples = self.samples(&mut unpacked)?;
        // Only reading to the end verifies the checksum.
        self.at_end(&mut unpacked)?;
        self.at_end(&mut unpacked.into_inner())?;
        Ok(samples)
    }

    fn samples(&self, reader: &mut impl Read) -> Result<Vec<u8>> {
        let magic = self.number(reader)?;
        if magic != self.content.magic() {
            return Err(self.wrong_magic(magic));
        }
        let count = u64::from(u32::from_be_bytes(self.number(reader)?));
        if self.content == Content::Images {
            let rows = u32::from_be_bytes(self.number(reader)?);
            let columns = u32::from_be_bytes(self.number(reader)?);
            if [rows, columns].map(u64::from) != [SIDE as u64; 2] {
                return Err(self.error(format!(
                    "holds images of {rows}x{columns} pixels; expected {SIDE}x{SIDE}: use a \
                     set of that size"
                )));
            }
        }
        if count == 0 {
            return Err(self.error("announces 0 samples; expected at least 1: download it again"));
        }
        // The header is not trusted with memory: the buffer grows with the data that is really there.
        let expected = count * self.content.size();
        let samples = self.up_to(reader, expected)?;
        if (samples.len() as u64) < expected {
            return Err(self.error(format!(
                "ends after {} of the {count} {} that its header announces ({} of {expected} \
                 bytes); download it again",
                samples.len() as u64 / self.content.size(),
                self.content.name(),
                samples.len(),
            )));
        }
        Ok(samples)
    }

    /// Reads the next four bytes of the header.
    fn number(&self, reader: &mut impl Read) -> Result<[u8; 4]> {
        let bytes = self.up_to(reader, 4)?;
        bytes.as_slice().try_into().map_err(|_| {
            self.error(format!(
                "ends within the header of {}; download it again",
                self.content.name()
            ))
        })
    }

    /// Reads at most `limit` bytes; fewer if the file, or what is packed in it, ends earlier.
    fn up_to(&self, reader: &mut impl Read, limit: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        match reader.by_ref().take(limit).read_to_end(&mut bytes) {
            Ok(_) => Ok(bytes),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(bytes),
            Err(error) => Err(self.unreadable(error)),
        }
    }

    fn at_end(&self, reader: &mut impl Read) -> Result<()> {
        match reader.by_ref().take(1).read_to_end(&mut Vec::new()) {
            Ok(0) => Ok(()),
            Ok(_) => Err(self.error(format!(
                "continues after the last of the {} that its header announces; expected its \
                 end there: download it again",
                self.content.name()
            ))),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                Err(self.error("ends within the checksum of its gzip data; download it again"))
            }
            Err(error) => Err(self.unreadable(error)),
        }
    }

    fn wrong_magic(&self, found: [u8; 4]) -> Error {
        let expected = self.content.magic();
        let other = match self.content {
            Content::Images => Content::Labels,
            Content::Labels => Content::Images,
        };
        let text = if found == other.magic() {
            format!(
                "holds {} where {} are expected; check whether two files were mixed up",
                other.name(),
                self.content.name()
            )
        } else {
            format!(
                "begins with the bytes {found:02x?}; expected {expected:02x?}, the beginning of \
                 an IDX file of {}: download it again",
                self.content.name()
            )
        };
        self.error(text)
    }

    /// Makes an error of the file's format from one of the gzip decoder about its content, or else an I/O error.
    fn unreadable(&self, error: io::Error) -> Error {
        match error.kind() {
            ErrorKind::InvalidData | ErrorKind::InvalidInput => Error::with_source(
                Kind::Data,
                format!(
                    "the data file `{}` is damaged and cannot be unpacked; download it again",
                    self.path.display()
                ),
                error,
            ),
            _ => self.io(error),
        }
    }

    fn io(&self, error: io::Error) -> Error {
        Error::io("read", self.path, error)
    }

    fn error(&self, text: impl fmt::Display) -> Error {
        let text = format!("the data file `{}` {text}", self.path.display());
        Error::new(Kind::Data, text)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs;
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::super::Digits;
    use super::*;

    pub(in super::super) fn image_file(digits: &Digits) -> Vec<u8> {
        let count = digits.count() as u32;
        let mut bytes = vec![0, 0, 8, 3];
        bytes.extend([count, 28, 28].into_iter().flat_map(u32::to_be_bytes));
        (0..digits.count()).for_each(|index| bytes.extend(digits.image(index)));
        bytes
    }

    pub(in super::super) fn label_file(digits: &Digits) -> Vec<u8> {
        let mut bytes = vec![0, 0, 8, 1];
        bytes.extend((digits.count() as u32).to_be_bytes());
        bytes.extend(digits.labels());
        bytes
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    /// Reads `bytes` as a file with that content.
    fn read(content: Content, bytes: &[u8]) -> Result<Vec<u8>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("some-ubyte");
        fs::write(&path, bytes).unwrap();
        match content {
            Content::Images => images(&path),
            Content::Labels => labels(&path),
        }
    }

    /// Checks that `bytes` are refused by an error that names the file and contains `part`.
    #[track_caller]
    fn assert_refused(content: Content, bytes: &[u8], part: &str) {
        let error = read(content, bytes).unwrap_err();
        let text = error.to_string();
        assert!(error.is_data() && text.contains("some-ubyte"), "{text}");
        assert!(text.contains(part), "{text}");
    }

    #[test]
    fn plain_and_packed_files_give_the_same() {
        let digits = Digits::draw(5, 1);
        let (plain_images, plain_labels) = (image_file(&digits), label_file(&digits));
        for pack in [<[u8]>::to_vec, gzip] {
            let pixels = read(Content::Images, &pack(&plain_images)).unwrap();
            assert_eq!(pixels, plain_images[16..]);
            let labels = read(Content::Labels, &pack(&plain_labels)).unwrap();
            assert_eq!(labels, digits.labels());
        }
    }

    #[test]
    fn a_truncated_file_is_refused_wherever_it_ends() {
        let whole = image_file(&Digits::draw(3, 1));
        for end in [0, 3, 4, 9, 15] {
            assert_refused(Content::Images, &whole[..end], "header");
        }
        for end in [16, 17, whole.len() - 1] {
            assert_refused(Content::Images, &whole[..end], "of the 3 images");
            assert_refused(Content::Images, &gzip(&whole[..end]), "of the 3 images");
        }
        let packed = gzip(&whole);
        for end in [
            2,
            packed.len() / 2,
            packed.len() - 9,
            packed.len() - 8,
            packed.len() - 1,
        ] {
            assert_refused(Content::Images, &packed[..end], " ends ");
        }
    }

    #[test]
    fn trailing_bytes_are_refused() {
        let mut whole = label_file(&Digits::draw(3, 1));
        let mut packed = gzip(&whole);
        packed.push(0);
        whole.push(1);
        for bytes in [&packed, &whole, &gzip(&whole)] {
            assert_refused(Content::Labels, bytes, "continues");
        }
    }

    #[test]
    fn another_format_is_refused() {
        let digits = Digits::draw(3, 1);
        let labels = label_file(&digits);
        assert_refused(Content::Images, &labels, "holds labels where images");
        let mut wide = image_file(&digits);
        wide[15] = 32;
        assert_refused(Content::Images, &wide, "28x32");
        let mut damaged = gzip(&image_file(&digits));
        let checksum = damaged.len() - 6;
        damaged[checksum] ^= 1;
        assert_refused(Content::Images, &damaged, "damaged");
        for (bytes, part) in [
            (&b"<html><body>"[..], "[3c, 68, 74, 6d]"),
            (&[0, 0, 8, 1, 0, 0, 0, 0], "0 samples"),
            (&[0, 0, 8, 1, 0, 0, 0, 2, 3, 10], "has 10"),
        ] {
            assert_refused(Content::Labels, bytes, part);
        }
    }

    #[test]
    fn a_header_that_announces_too_much_costs_no_memory() {
        let bytes = [
            0, 0, 8, 3, 255, 255, 255, 255, 0, 0, 0, 28, 0, 0, 0, 28, 1, 2,
        ];
        assert_refused(Content::Images, &bytes, "of the 4294967295 images");
    }

    #[test]
    fn a_file_that_cannot_be_opened_is_named() {
        let error = labels(Path::new("/nowhere/some-ubyte")).unwrap_err();
        assert!(error.is_io());
        assert!(error.to_string().contains("/nowhere/some-ubyte"), "{error}");
    }
}
