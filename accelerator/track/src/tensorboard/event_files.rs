//! Event files of TensorBoard: events as protobuf, the records of a file, and the files of a run.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use accelerator_host::fs::{Draft, Durability, Replace};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::record::{EndStatus, Number, RunId};
use crate::run_files::{EVENTS, STAGED};
use crate::sink::RunInfo;

/// A record of an event file.
#[derive(Debug)]
pub(super) struct Event<'a> {
    /// Milliseconds since 1970.
    pub(super) ms: u64,
    pub(super) step: u64,
    pub(super) kind: EventKind<'a>,
}

#[derive(Debug)]
pub(super) enum EventKind<'a> {
    /// The first record of every file.
    FileVersion,
    /// Readers drop what they hold of this run from the event's step on.
    SessionStart,
    Summary(&'a [SummaryValue<'a>]),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct SummaryValue<'a> {
    pub(super) tag: &'a str,
    pub(super) data: SummaryData<'a>,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum SummaryData<'a> {
    Scalar(f32),
    Text(&'a str),
    Histogram(&'a [[Number; 3]]),
    Image {
        width: u32,
        height: u32,
        encoded: &'a [u8],
    },
    Hyperparameters {
        set: &'a BTreeMap<String, Value>,
        started_ms: u64,
    },
    End {
        status: EndStatus,
        ms: u64,
    },
}

/// The tag under which TensorBoard looks for hyperparameters.
pub(super) const HYPERPARAMETERS: &str = "_hparams_/session_start_info";
/// The tag under which TensorBoard looks for how a run ended.
pub(super) const END: &str = "_hparams_/session_end_info";

impl Event<'_> {
    pub(super) fn encode(&self, event: &mut ProtobufMessage) {
        event.clear();
        event.double(1, seconds(self.ms));
        if self.step > 0 {
            event.varint(2, self.step.min(i64::MAX as u64));
        }
        match self.kind {
            EventKind::FileVersion => event.data(3, b"brain.Event:2"),
            EventKind::SessionStart => event.message(7, |session| session.varint(1, 1)),
            EventKind::Summary(values) => event.message(5, |summary| {
                for value in values {
                    summary.message(1, |message| value.encode(message));
                }
            }),
        }
    }
}

impl SummaryValue<'_> {
    fn encode(&self, value: &mut ProtobufMessage) {
        value.data(1, self.tag.as_bytes());
        match self.data {
            SummaryData::Scalar(scalar) => value.float(2, scalar),
            SummaryData::Text(text) => {
                value.message(8, |tensor| strings(tensor, &[], &[text.as_bytes()]));
                plugin(value, "text", TENSORS, |_| ());
            }
            SummaryData::Histogram(bins) => {
                value.message(8, |tensor| doubles(tensor, bins));
                plugin(value, "histograms", TENSORS, |_| ());
            }
            SummaryData::Image {
                width,
                height,
                encoded,
            } => {
                let (width, height) = (width.to_string(), height.to_string());
                let strings_of_image = [width.as_bytes(), height.as_bytes(), encoded];
                value.message(8, |tensor| strings(tensor, &[3], &strings_of_image));
                plugin(value, "images", BLOBS, |_| ());
            }
            SummaryData::Hyperparameters { set, started_ms } => {
                value.message(8, empty);
                plugin(value, "hparams", TENSORS, |content| {
                    content.message(3, |start| {
                        for (key, value) in set {
                            hyperparameter(start, key, value);
                        }
                        start.double(5, seconds(started_ms));
                    });
                });
            }
            SummaryData::End { status, ms } => {
                value.message(8, empty);
                plugin(value, "hparams", TENSORS, |content| {
                    content.message(4, |end| {
                        end.varint(1, session_status(status));
                        end.double(2, seconds(ms));
                    });
                });
            }
        }
    }
}

const TENSORS: u64 = 2;
const BLOBS: u64 = 3;

const FLOAT: u64 = 1;
const DOUBLE: u64 = 2;
const STRING: u64 = 7;

/// The plugin of TensorBoard that shows a value, with its metadata.
fn plugin(
    value: &mut ProtobufMessage,
    name: &str,
    data_class: u64,
    content: impl FnOnce(&mut ProtobufMessage),
) {
    value.message(9, |metadata| {
        metadata.message(1, |plugin| {
            plugin.data(1, name.as_bytes());
            plugin.message(2, content);
        });
        metadata.varint(4, data_class);
    });
}

fn strings(tensor: &mut ProtobufMessage, shape: &[u64], strings: &[&[u8]]) {
    tensor.varint(1, STRING);
    tensor.message(2, |message| dimensions(message, shape));
    for string in strings {
        tensor.data(8, string);
    }
}

fn doubles(tensor: &mut ProtobufMessage, rows: &[[Number; 3]]) {
    tensor.varint(1, DOUBLE);
    tensor.message(2, |message| dimensions(message, &[rows.len() as u64, 3]));
    let content: Vec<u8> = rows
        .iter()
        .flatten()
        .flat_map(|number| number.0.to_le_bytes())
        .collect();
    tensor.data(4, &content);
}

/// A tensor without elements.
fn empty(tensor: &mut ProtobufMessage) {
    tensor.varint(1, FLOAT);
    tensor.message(2, |message| dimensions(message, &[0]));
}

fn dimensions(message: &mut ProtobufMessage, shape: &[u64]) {
    for size in shape {
        message.message(2, |dimension| dimension.varint(1, *size));
    }
}

/// A number stays a number, so that TensorBoard can sort and filter by it. A null is left out.
fn hyperparameter(start: &mut ProtobufMessage, key: &str, value: &Value) {
    if value.is_null() {
        return;
    }
    start.message(1, |entry| {
        entry.data(1, key.as_bytes());
        entry.message(2, |message| match value {
            Value::Number(number) => message.double(2, number.as_f64().unwrap_or(f64::NAN)),
            Value::Bool(value) => message.varint(4, u64::from(*value)),
            Value::String(text) => message.data(3, text.as_bytes()),
            other => message.data(3, other.to_string().as_bytes()),
        });
    });
}

fn session_status(status: EndStatus) -> u64 {
    match status {
        EndStatus::Finished => 1,
        EndStatus::Failed => 2,
        // It continues when it is started again.
        EndStatus::Preempted => 3,
    }
}

fn seconds(ms: u64) -> f64 {
    ms as f64 / 1000.0
}

/// An encoded message. Fields are appended in the order of calls; none is left out, not even a default.
#[derive(Debug, Default)]
pub(super) struct ProtobufMessage(Vec<u8>);

impl ProtobufMessage {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) fn varint(&mut self, field: u32, value: u64) {
        self.key(field, 0);
        push_varint(&mut self.0, value);
    }

    pub(super) fn double(&mut self, field: u32, value: f64) {
        self.key(field, 1);
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(super) fn float(&mut self, field: u32, value: f32) {
        self.key(field, 5);
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(super) fn data(&mut self, field: u32, data: &[u8]) {
        self.key(field, 2);
        push_varint(&mut self.0, data.len() as u64);
        self.0.extend_from_slice(data);
    }

    /// A message within this one.
    pub(super) fn message(&mut self, field: u32, fill: impl FnOnce(&mut Self)) {
        self.key(field, 2);
        // Most lengths take one byte; if this one takes more, the message moves.
        let start = self.0.len();
        self.0.push(0);
        fill(self);
        let mut length = Vec::with_capacity(10);
        push_varint(&mut length, (self.0.len() - start - 1) as u64);
        self.0.splice(start..=start, length);
    }

    fn key(&mut self, field: u32, wire_type: u32) {
        push_varint(&mut self.0, u64::from(field << 3 | wire_type));
    }
}

fn push_varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

/// The time after which every reader has passed on to the next file. TensorBoard looks every 5 seconds, later if there
/// is much to read.
const PASSED_ON: Duration = Duration::from_secs(300);

/// A file that grows, and one that is read before it.
///
/// Readers take files in the order of their names, and keep the first word about a run's hyperparameters and end. So
/// what becomes known later is written to a file that comes before: a reader that starts then finds the last word
/// first.
#[derive(Debug)]
pub(super) struct EventFiles {
    folder: PathBuf,
    run: RunId,
    created_ms: u64,
    /// A number in place of the time of creation in names: greater than in every name that exists.
    order: u64,
    events: RecordFile<Draft>,
    message: ProtobufMessage,
    /// The files that the visible one took the place of, and when they are removed.
    older: Option<(Vec<PathBuf>, Instant)>,
}

impl EventFiles {
    /// Begins the run anew, in a file that no reader sees before it is flushed.
    pub(super) fn create(folder: &Path, run: &RunInfo) -> Result<Self> {
        fs::create_dir_all(folder).map_err(|e| Error::io("create the folder", folder, e))?;
        let names = names(folder)?;
        let greatest = names.iter().filter_map(|name| order(name)).max();
        let created = run.created_ms / 1000;
        let order = greatest.map_or(created, |greatest| created.max(greatest + 1));
        let hidden = folder.join(hidden_name(run.id));
        let path = path_of(folder, order, EVENTS_PLACE, run.id);
        let file = Replace::new(&path, Durability::Cached).draft(hidden.clone());
        let file = file
            .begin()
            .map_err(|e| Error::io("create the file", &hidden, e))?;
        let mut files = Self {
            folder: folder.to_owned(),
            run: run.id,
            created_ms: run.created_ms,
            order,
            events: RecordFile::new(file),
            message: ProtobufMessage::default(),
            older: None,
        };
        files.write(run.created_ms, 0, EventKind::FileVersion)?;
        // One reader needs this to give up what it holds, and passes over the first of them that it sees.
        files.write(run.created_ms, 0, EventKind::SessionStart)?;
        Ok(files)
    }

    pub(super) fn write(&mut self, ms: u64, step: u64, kind: EventKind<'_>) -> Result<()> {
        Event { ms, step, kind }.encode(&mut self.message);
        self.events
            .write(self.message.bytes())
            .map_err(|e| Error::io("write event files in", &self.folder, e))
    }

    /// Makes what was written visible; the first time, instead of what was there of this run.
    pub(super) fn flush(&mut self) -> Result<()> {
        self.events
            .flush()
            .map_err(|e| Error::io("write event files in", &self.folder, e))?;
        match &mut self.older {
            None => {
                let published = self.events.0.get_mut().publish();
                published.map_err(|e| Error::io("rename", &self.path_of_events(), e))?;
                self.older = Some((self.empty_older()?, Instant::now() + PASSED_ON));
            }
            Some((older, time)) if Instant::now() >= *time => {
                for path in older.drain(..) {
                    let removed = fs::remove_file(&path);
                    tell(removed, "remove", &path);
                }
            }
            Some(_) => {}
        }
        Ok(())
    }

    /// Writes values that are read before those written here earlier, in place of those that this wrote earlier.
    pub(super) fn write_before(&self, values: &[SummaryValue<'_>]) -> Result<()> {
        let path = self.path_before();
        let draft = self.folder.join(format!("{}.first", hidden_name(self.run)));
        let file = Replace::new(&path, Durability::Cached).draft(draft);
        let write = || {
            let mut file = RecordFile::new(file.begin()?);
            let mut message = ProtobufMessage::default();
            for kind in [EventKind::FileVersion, EventKind::Summary(values)] {
                let (ms, step) = (self.created_ms, 0);
                Event { ms, step, kind }.encode(&mut message);
                file.write(message.bytes())?;
            }
            file.flush()?;
            file.0.get_mut().publish()
        };
        write().map_err(|e| Error::io("write", &path, e))
    }

    fn path_before(&self) -> PathBuf {
        path_of(&self.folder, self.order, BEFORE_PLACE, self.run)
    }

    fn path_of_events(&self) -> PathBuf {
        path_of(&self.folder, self.order, EVENTS_PLACE, self.run)
    }

    /// Empties this run's files of earlier times. Other programs' stay, and so do those of other runs.
    ///
    /// Without the file that it reads, one reader never comes to the next: files are removed when it has.
    fn empty_older(&self) -> Result<Vec<PathBuf>> {
        let end = format!(".{}", self.run);
        let kept = [self.path_before(), self.path_of_events()];
        let older: Vec<_> = names(&self.folder)?
            .iter()
            .filter(|name| name.starts_with(EVENTS) && name.ends_with(&end))
            .map(|name| self.folder.join(name))
            .filter(|path| !kept.contains(path))
            .collect();
        for path in &older {
            tell(File::create(path).map(drop), "empty", path);
        }
        Ok(older)
    }
}

/// The rest of an earlier file must not stop the sink.
fn tell(result: io::Result<()>, doing: &str, path: &Path) {
    if let Err(error) = result {
        let path = path.display();
        tracing::warn!("cannot {doing} {path}: {error}; TensorBoard may show what was taken back");
    }
}

fn path_of(folder: &Path, order: u64, place: u8, run: RunId) -> PathBuf {
    folder.join(format!("{EVENTS}{order:010}.{place}.{run}"))
}

/// The place, among the two files of a run, of the one with values that became known later.
const BEFORE_PLACE: u8 = 0;
/// The place of the file that grows.
const EVENTS_PLACE: u8 = 1;

/// The name of a file that is not to be read yet. There is one per run, so none is left behind for ever.
fn hidden_name(run: RunId) -> String {
    format!("{STAGED}{run}")
}

fn order(name: &str) -> Option<u64> {
    let (order, _) = name.strip_prefix(EVENTS)?.split_once('.')?;
    // Ten digits sort as numbers do.
    order.parse().ok().filter(|order| *order < 9_999_999_999)
}

fn names(folder: &Path) -> Result<Vec<String>> {
    let read = || {
        fs::read_dir(folder)?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<io::Result<_>>()
    };
    read().map_err(|e| Error::io("read the folder", folder, e))
}

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
    use crate::tests::{assert_says, run_info};

    fn encoded(event: &Event<'_>) -> Vec<u8> {
        let mut message = ProtobufMessage::default();
        event.encode(&mut message);
        message.bytes().to_vec()
    }

    #[test]
    fn a_scalar_has_the_bytes_that_tensorboard_reads() {
        let event = Event {
            ms: 1_700_000_001_000,
            step: 1,
            kind: EventKind::Summary(&[SummaryValue {
                tag: "loss",
                data: SummaryData::Scalar(0.5),
            }]),
        };
        let expected = b"\x09\0\0\x40\x40\xfc\x54\xd9\x41\x10\x01\
        \x2a\x0d\x0a\x0b\x0a\x04loss\x15\0\0\0\x3f";
        assert_eq!(encoded(&event), expected);
    }

    #[test]
    fn a_step_beyond_the_formats_is_the_formats_last() {
        let event = Event {
            ms: 0,
            step: u64::MAX,
            kind: EventKind::SessionStart,
        };
        let expected =
            b"\x09\0\0\0\0\0\0\0\0\x10\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x3a\x02\x08\x01";
        assert_eq!(encoded(&event), expected);
    }

    #[test]
    fn a_histogram_is_a_tensor_of_its_bins() {
        let event = Event {
            ms: 0,
            step: 0,
            kind: EventKind::Summary(&[SummaryValue {
                tag: "h",
                data: SummaryData::Histogram(&[[Number(0.0), Number(1.0), Number(2.0)]]),
            }]),
        };
        let expected = b"\x09\0\0\0\0\0\0\0\0\x2a\x41\x0a\x3f\x0a\x01h\
        \x42\x26\x08\x02\x12\x08\x12\x02\x08\x01\x12\x02\x08\x03\
        \x22\x18\0\0\0\0\0\0\0\0\0\0\0\0\0\0\xf0\x3f\0\0\0\0\0\0\0\x40\
        \x4a\x12\x0a\x0e\x0a\x0ahistograms\x12\0\x20\x02";
        assert_eq!(encoded(&event), expected);
    }

    #[test]
    fn fields_are_encoded_as_in_protobufs_documentation() {
        let mut message = ProtobufMessage::default();
        message.varint(1, 150);
        message.data(2, b"testing");
        message.message(3, |inner| inner.varint(1, 150));
        assert_eq!(
            message.bytes(),
            b"\x08\x96\x01\x12\x07testing\x1a\x03\x08\x96\x01"
        );
    }

    #[test]
    fn the_length_of_a_message_takes_as_many_bytes_as_it_needs() {
        for length in [0, 125, 126, 16_380, 16_384, 3_000_000] {
            let mut inner = ProtobufMessage::default();
            inner.data(2, &vec![7; length]);
            let mut outer = ProtobufMessage::default();
            outer.message(1, |message| message.data(2, &vec![7; length]));
            let mut expected = ProtobufMessage::default();
            expected.data(1, inner.bytes());
            assert_eq!(outer.bytes(), expected.bytes(), "{length}");
        }
        let mut message = ProtobufMessage::default();
        message.varint(1, u64::MAX);
        assert_eq!(message.bytes().len(), 11);
    }

    #[test]
    fn a_new_file_takes_the_place_of_the_runs_older_ones_and_of_no_other() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = temporary.path().join("new/folder");
        let [run, other] = [1_700_000_000_000, 1_600_000_000_000].map(|created_ms| RunInfo {
            created_ms,
            ..run_info(&folder)
        });
        let path = |order: u64, place: u32, run: &RunInfo| {
            folder.join(format!(
                "events.out.tfevents.{order:010}.{place}.{}",
                run.id
            ))
        };

        let mut first = EventFiles::create(&folder, &run).unwrap();
        assert!(
            names(&folder)
                .unwrap()
                .iter()
                .all(|name| !name.contains("tfevents"))
        );
        first.flush().unwrap();
        first.write_before(&[]).unwrap();
        EventFiles::create(&folder, &other)
            .unwrap()
            .flush()
            .unwrap();
        let foreign = folder.join("events.out.tfevents.1700000005.host.1.0");
        fs::write(&foreign, "foreign").unwrap();

        // The rest of a process that was killed is overwritten.
        drop(EventFiles::create(&folder, &run).unwrap());
        let mut second = EventFiles::create(&folder, &run).unwrap();
        let value = SummaryValue {
            tag: "a",
            data: SummaryData::Scalar(1.0),
        };
        second.write(0, 1, EventKind::Summary(&[value])).unwrap();
        let first_paths = [path(1_700_000_000, 0, &run), path(1_700_000_000, 1, &run)];
        for path in &first_paths {
            assert_ne!(path.metadata().unwrap().len(), 0, "before it is flushed");
        }
        second.flush().unwrap();
        for path in &first_paths {
            assert_eq!(
                path.metadata().unwrap().len(),
                0,
                "a reader may still be there"
            );
        }
        // Its name comes after all that were there.
        let second_path = path(1_700_000_006, 1, &run);
        let length = second_path.metadata().unwrap().len();

        second.older.as_mut().unwrap().1 = Instant::now();
        second.flush().unwrap();
        second.flush().unwrap();
        let mut left: Vec<_> = names(&folder)
            .unwrap()
            .iter()
            .map(|name| folder.join(name))
            .collect();
        left.sort();
        let other_path = path(1_700_000_001, 1, &other);
        assert_eq!(
            left,
            [other_path.clone(), foreign.clone(), second_path.clone()]
        );
        assert_ne!(other_path.metadata().unwrap().len(), 0);
        assert_eq!(fs::read(&foreign).unwrap(), b"foreign");
        assert_eq!(second_path.metadata().unwrap().len(), length);
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let temporary = tempfile::NamedTempFile::new().unwrap();
        let path = temporary.path();
        let error = EventFiles::create(path, &run_info(path)).unwrap_err();
        assert!(error.is_io(), "{error}");
        assert_says(&error, path.to_str().unwrap());
    }

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
