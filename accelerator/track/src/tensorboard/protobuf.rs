//! As much of protobuf's encoding as event files need: a crate for it would be longer to set up than this is to read.

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
        // Most lengths take one byte; where this one takes more, the message moves.
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
