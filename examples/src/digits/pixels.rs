//! Serializes an image as bytes: serde supports arrays of up to 32 elements only.

use core::fmt;

use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserializer, Serializer};

use super::PIXELS;

pub(super) fn serialize<S: Serializer>(
    image: &[u8; PIXELS],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_bytes(image)
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<[u8; PIXELS], D::Error> {
    deserializer.deserialize_bytes(Image)
}

struct Image;

impl<'de> Visitor<'de> for Image {
    type Value = [u8; PIXELS];

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PIXELS} grey values")
    }

    fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Self::Value, E> {
        bytes
            .try_into()
            .map_err(|_| E::invalid_length(bytes.len(), &self))
    }

    /// Reads the sequence that formats without bytes, such as JSON, make of them.
    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Self::Value, A::Error> {
        let mut bytes = Vec::with_capacity(PIXELS);
        while let Some(value) = values.next_element()? {
            bytes.push(value);
        }
        self.visit_bytes(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use burn::data::dataset::Dataset;

    use crate::digits::{Digit, Digits};

    #[test]
    fn a_digit_that_travelled_is_the_same() {
        let digit = Digits::draw(3, 7).get(2).unwrap();
        let text = serde_json::to_string(&digit).unwrap();
        assert_eq!(serde_json::from_str::<Digit>(&text).unwrap(), digit);
        let short = text.replacen("[0,", "[", 1);
        let error = serde_json::from_str::<Digit>(&short).unwrap_err();
        assert!(error.to_string().contains("784 grey values"), "{error}");
    }
}
