//! Events of TensorBoard, and their encoding.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::record::{EndStatus, Number};

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

#[cfg(test)]
mod tests {
    use super::*;

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
}
