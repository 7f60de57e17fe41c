//! The entries of a journal, and the identity of a run.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::de::{self, SeqAccess, Visitor};
use serde::ser::SerializeSeq;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use uuid::Uuid;

use crate::error::{Error, Kind};

/// A line of a journal: a [`Record`], its number and when it was made.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Counts the lines of the journal from 0.
    pub n: u64,
    /// Milliseconds since 1970, by the clock of the host that wrote it.
    pub ms: u64,
    /// The record.
    pub record: Record,
}

/// The contents of a line of a journal.
///
/// ```
/// use accelerator_track::Record;
///
/// let record: Record = serde_json::from_str(r#"{"t":"checkpoint","step":100,"covers":7}"#).unwrap();
/// assert_eq!(record, Record::Checkpoint { step: Some(100), covers: 7 });
/// // What a later version of the same format adds is passed over.
/// let record: Record = serde_json::from_str(r#"{"t":"later","x":1}"#).unwrap();
/// assert_eq!(record, Record::Unknown);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "lowercase")]
#[non_exhaustive]
pub enum Record {
    /// The first line: what the journal is of.
    Head {
        /// The version of the format.
        version: u32,
        /// The run's identity.
        run: RunId,
        /// Its name, as it was given.
        name: String,
    },
    /// A process began to write: the program's first start, or a restart.
    Attempt {
        /// Counts them from 0.
        attempt: u32,
        /// The number of ranks.
        world: usize,
        /// The launch that it belongs to, which is the same for the restarts of a launcher.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        launch: Option<String>,
        /// The program's origin and machine.
        provenance: Value,
    },
    /// Hyperparameters. What is nested is joined with dots. A later value of a key stands beside the earlier ones.
    Param {
        /// Their values by key.
        set: BTreeMap<String, Value>,
    },
    /// Tags. A later value of a key replaces the earlier one.
    Tag {
        /// Their values by key.
        set: BTreeMap<String, String>,
    },
    /// The name of a series, before its first point.
    Series {
        /// The number by which points refer to it.
        i: u32,
        /// `kind/name`, as `train/loss`.
        key: String,
    },
    /// The metrics of one call of `log`.
    #[serde(rename = "m")]
    Metrics(Metrics),
    /// A text.
    Text {
        /// `kind/name`.
        key: String,
        /// The step it belongs to.
        step: u64,
        /// Markdown.
        text: String,
    },
    /// A histogram of the values of a tensor.
    Histogram {
        /// `kind/name`.
        key: String,
        /// The step it belongs to.
        step: u64,
        /// Left and right edge of each bin, and how many values are in it.
        bins: Vec<[Number; 3]>,
    },
    /// An image; the file is `blobs/HASH` in the run's folder.
    Image {
        /// `kind/name`.
        key: String,
        /// The step it belongs to.
        step: u64,
        /// BLAKE3 of the file, hexadecimal.
        hash: String,
        /// `image/png` or `image/jpeg`.
        mime: String,
        /// The width in pixels.
        width: u32,
        /// The height in pixels.
        height: u32,
    },
    /// A curve of one step: precision over recall, a spectrum.
    Plot {
        /// `kind/name`.
        key: String,
        /// The step it belongs to.
        step: u64,
        /// The label of the x axis.
        x_label: String,
        /// The label of the y axis.
        y_label: String,
        /// Its points, x and y.
        points: Vec<[Number; 2]>,
    },
    /// The run made or used a version of an artifact.
    Artifact {
        /// The artifact's part in the run.
        role: ArtifactRole,
        /// The artifact's name.
        name: String,
        /// Its version.
        version: u32,
        /// The hash of its contents.
        digest: String,
    },
    /// A digest of the weights of a model.
    Weights {
        /// The greatest step that was logged before; 0 if none was.
        step: u64,
        /// A hash of their bits, hexadecimal.
        digest: String,
    },
    /// A checkpoint is on the disk. What it covers stays when the run resumes from it.
    Checkpoint {
        /// The greatest step that was logged before the checkpoint was taken, if any was.
        step: Option<u64>,
        /// The number of the first entry that it does not cover.
        covers: u64,
    },
    /// The run resumed from a checkpoint: once something is logged after it, earlier entries for greater steps do not
    /// count.
    Rewind {
        /// The step of the checkpoint; `None` if the run starts over.
        to: Option<u64>,
    },
    /// Measurements of a rank's host, in the journal of that rank.
    System {
        /// Values by name, as `cpu` (cores in use by the process) and `memory` (its bytes); see
        /// [`SystemSampler`](crate::internal::SystemSampler).
        values: BTreeMap<String, Number>,
    },
    /// Entries were lost: the disk was full, or slower than the program.
    Lost {
        /// The number of entries.
        entries: u64,
    },
    /// The program ended, or said that it will.
    End {
        /// The status.
        status: EndStatus,
        /// The cause of a failure.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        failure: Option<Value>,
    },
    /// A record of a later version of the format.
    #[serde(other)]
    Unknown,
}

/// The metrics of one call of `log`.
///
/// ```
/// use accelerator_track::{Metrics, Number, PointValue};
///
/// let point = PointValue { series: 0, value: Number(0.5), count: None };
/// let metrics = Metrics { step: 3, epoch: None, points: vec![point] };
/// assert_eq!(serde_json::to_string(&metrics).unwrap(), r#"{"s":3,"p":[[0,0.5]]}"#);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    /// The step they belong to.
    #[serde(rename = "s")]
    pub step: u64,
    /// The epoch, if known; within one, a fraction.
    #[serde(rename = "e", default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<f64>,
    /// One value per series.
    #[serde(rename = "p")]
    pub points: Vec<PointValue>,
}

/// A value of a series, in a journal `[series, value]` or `[series, value, count]`.
///
/// ```
/// use accelerator_track::{Number, PointValue};
///
/// let point: PointValue = serde_json::from_str(r#"[2, "NaN", 30]"#).unwrap();
/// assert_eq!((point.series, point.count), (2, Some(30)));
/// assert!(point.value.0.is_nan());
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PointValue {
    /// The number of the series.
    pub series: u32,
    /// The value.
    pub value: Number,
    /// The number of samples that it is a mean of, if known.
    pub count: Option<u64>,
}

/// A number that may be `"NaN"`, `"inf"` or `"-inf"`, for which JSON has no number.
///
/// ```
/// use accelerator_track::Number;
///
/// assert_eq!(serde_json::to_string(&Number(f64::INFINITY)).unwrap(), r#""inf""#);
/// assert_eq!(serde_json::from_str::<Number>("0.1").unwrap(), Number(0.1));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Number(pub f64);

/// The part of an artifact in a run.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ArtifactRole {
    /// The run made it.
    Output,
    /// The run used it.
    Input,
}

/// The end of a program.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EndStatus {
    /// It did what it was started for.
    Finished,
    /// It failed.
    Failed,
    /// It was asked to stop, and saved first.
    Preempted,
}

impl Record {
    /// The step of what was logged.
    pub(crate) fn step(&self) -> Option<u64> {
        match self {
            Self::Metrics(metrics) => Some(metrics.step),
            Self::Text { step, .. }
            | Self::Histogram { step, .. }
            | Self::Image { step, .. }
            | Self::Plot { step, .. } => Some(*step),
            _ => None,
        }
    }
}

impl EndStatus {
    /// Returns true if the run will not continue from an earlier checkpoint, as failed and preempted ones may.
    pub(crate) fn is_final(self) -> bool {
        self == Self::Finished
    }
}

impl fmt::Display for ArtifactRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Output => "output",
            Self::Input => "input",
        })
    }
}

impl fmt::Display for EndStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Finished => "finished",
            Self::Failed => "failed",
            Self::Preempted => "preempted",
        })
    }
}

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            value if value.is_finite() => serializer.serialize_f64(value),
            value if value.is_nan() => serializer.serialize_str("NaN"),
            value if value > 0.0 => serializer.serialize_str("inf"),
            _ => serializer.serialize_str("-inf"),
        }
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NumberVisitor;

        impl Visitor<'_> for NumberVisitor {
            type Value = Number;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number, \"NaN\", \"inf\" or \"-inf\"")
            }

            fn visit_f64<E>(self, value: f64) -> Result<Number, E> {
                Ok(Number(value))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Number, E> {
                Ok(Number(value as f64))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Number, E> {
                Ok(Number(value as f64))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Number, E> {
                match text {
                    "NaN" => Ok(Number(f64::NAN)),
                    "inf" => Ok(Number(f64::INFINITY)),
                    "-inf" => Ok(Number(f64::NEG_INFINITY)),
                    _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
                }
            }
        }

        deserializer.deserialize_any(NumberVisitor)
    }
}

impl Serialize for PointValue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_seq(None)?;
        fields.serialize_element(&self.series)?;
        fields.serialize_element(&self.value)?;
        if let Some(count) = self.count {
            fields.serialize_element(&count)?;
        }
        fields.end()
    }
}

impl<'de> Deserialize<'de> for PointValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PointVisitor;

        impl<'de> Visitor<'de> for PointVisitor {
            type Value = PointValue;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("[series, value] or [series, value, count]")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut fields: A) -> Result<PointValue, A::Error> {
                let missing = |at| de::Error::invalid_length(at, &self);
                Ok(PointValue {
                    series: fields.next_element()?.ok_or_else(|| missing(0))?,
                    value: fields.next_element()?.ok_or_else(|| missing(1))?,
                    count: fields.next_element()?,
                })
            }
        }

        deserializer.deserialize_seq(PointVisitor)
    }
}

/// The identity of a run: a UUID of version 7, which sorts by the time of creation. It stays the same through kills,
/// restarts and resumes.
///
/// ```
/// use accelerator_track::RunId;
///
/// let id = RunId::new();
/// assert_eq!(id.to_string().parse::<RunId>().unwrap(), id);
/// assert!("my run".parse::<RunId>().is_err());
/// ```
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RunId(Uuid);

impl RunId {
    /// A new one.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "no two are equal")]
    pub fn new() -> Self {
        Self(Uuid::now_v7())
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for RunId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        text.parse().map(Self).map_err(|_| {
            Error::new(
                Kind::Misuse,
                format!("expected the id of a run, a UUID, found {text:?}"),
            )
        })
    }
}

impl TryFrom<String> for RunId {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

impl From<RunId> for String {
    fn from(id: RunId) -> Self {
        id.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_bit_for_bit() {
        for value in [
            0.1,
            -0.0,
            1.0,
            5e-324,
            f64::MAX,
            1e16,
            123_456_789.123_456_79,
        ] {
            let text = serde_json::to_string(&Number(value)).unwrap();
            let back: Number = serde_json::from_str(&text).unwrap();
            assert_eq!(back.0.to_bits(), value.to_bits(), "{text}");
        }
        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let text = serde_json::to_string(&Number(value)).unwrap();
            let back: Number = serde_json::from_str(&text).unwrap();
            assert!(back.0 == value || (back.0.is_nan() && value.is_nan()));
        }
        assert!(serde_json::from_str::<Number>("\"nan\"").is_err());
    }
}
