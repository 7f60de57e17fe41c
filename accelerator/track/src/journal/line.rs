//! Lines of a journal: `{"t":…,"n":…,"ms":…, …,"c":"CRC-32C"}`.

use serde::Deserialize;

use crate::record::{Entry, Metrics, Record};

/// Appends an entry as a line.
pub(crate) fn encode(entry: &Entry, line: &mut Vec<u8>) -> serde_json::Result<()> {
    let start = line.len();
    serde_json::to_writer(&mut *line, &entry.record)?;
    // `{"t":"word"` comes first: the number and the time go behind it.
    let word = TAG.len()
        + line[start + TAG.len()..]
            .iter()
            .take_while(|&&x| x != b'"')
            .count()
        + 1;
    let position = format!(r#","n":{},"ms":{}"#, entry.n, entry.ms);
    line.splice(start + word..start + word, position.into_bytes());
    // The brace at the end.
    line.pop();
    let checksum = crc32c::crc32c(&line[start..]);
    line.extend_from_slice(format!("{CHECKSUM}{checksum:08x}\"}}\n").as_bytes());
    Ok(())
}

/// The entry of a line without its newline; none where the line is damaged.
pub(crate) fn parse(line: &[u8]) -> Option<Entry> {
    if !is_intact(line) {
        return None;
    }
    if starts(line, "m") {
        let line: MetricsLine = serde_json::from_slice(line).ok()?;
        return Some(Entry {
            n: line.n,
            ms: line.ms,
            record: Record::Metrics(line.metrics()),
        });
    }
    let Position { n, ms } = serde_json::from_slice(line).ok()?;
    let record = serde_json::from_slice(line).ok()?;
    Some(Entry { n, ms, record })
}

/// Whether a line is as it was written.
pub(crate) fn is_intact(line: &[u8]) -> bool {
    let Some(at) = line.len().checked_sub(CHECKSUM.len() + 8 + 2) else {
        return false;
    };
    let (covered, end) = line.split_at(at);
    let found = end
        .strip_prefix(CHECKSUM.as_bytes())
        .and_then(|x| x.strip_suffix(b"\"}"))
        .and_then(|x| std::str::from_utf8(x).ok())
        .and_then(|x| u32::from_str_radix(x, 16).ok());
    found == Some(crc32c::crc32c(covered))
}

/// Whether a line is a record of this tag.
pub(crate) fn starts(line: &[u8], tag: &str) -> bool {
    line.strip_prefix(TAG.as_bytes())
        .and_then(|x| x.strip_prefix(tag.as_bytes()))
        .is_some_and(|x| x.first() == Some(&b'"'))
}

const TAG: &str = r#"{"t":""#;
const CHECKSUM: &str = r#","c":""#;

#[derive(Deserialize)]
struct Position {
    n: u64,
    ms: u64,
}

/// Most lines are metrics: they are read without serde's buffer for tagged enums.
#[derive(Deserialize)]
struct MetricsLine {
    n: u64,
    ms: u64,
    s: u64,
    #[serde(default)]
    e: Option<f64>,
    p: Vec<crate::record::PointValue>,
}

impl MetricsLine {
    fn metrics(self) -> Metrics {
        Metrics {
            step: self.s,
            epoch: self.e,
            points: self.p,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Number, PointValue};

    fn metrics() -> Entry {
        Entry {
            n: 12,
            ms: 1_700_000_000_000,
            record: Record::Metrics(Metrics {
                step: 100,
                epoch: Some(1.5),
                points: vec![
                    PointValue {
                        series: 0,
                        value: Number(0.5),
                        count: None,
                    },
                    PointValue {
                        series: 1,
                        value: Number(f64::INFINITY),
                        count: Some(30),
                    },
                ],
            }),
        }
    }

    fn line(entry: &Entry) -> Vec<u8> {
        let mut line = Vec::new();
        encode(entry, &mut line).unwrap();
        assert_eq!(line.pop(), Some(b'\n'));
        line
    }

    #[test]
    fn a_line_is_json_with_the_tag_first_and_the_checksum_last() {
        let line = String::from_utf8(line(&metrics())).unwrap();
        let (text, checksum) = line.split_at(line.len() - 16);
        assert_eq!(
            text,
            r#"{"t":"m","n":12,"ms":1700000000000,"s":100,"e":1.5,"p":[[0,0.5],[1,"inf",30]]"#
        );
        assert_eq!(
            checksum,
            format!(",\"c\":\"{:08x}\"}}", crc32c::crc32c(text.as_bytes()))
        );
        serde_json::from_str::<serde_json::Value>(&line).unwrap();
    }

    #[test]
    fn entries_come_back() {
        let text = Entry {
            n: 0,
            ms: 1,
            record: Record::Text {
                key: "a\"b/c".to_owned(),
                step: 3,
                text: "line\nbreak \u{1F600}".to_owned(),
            },
        };
        for entry in [metrics(), text] {
            assert_eq!(parse(&line(&entry)), Some(entry));
        }
    }

    #[test]
    fn a_flipped_bit_is_noticed() {
        let line = line(&metrics());
        for at in 0..line.len() {
            let mut damaged = line.clone();
            damaged[at] ^= 1;
            assert_eq!(parse(&damaged), None, "byte {at}");
            assert_eq!(parse(&line[..at]), None, "cut at {at}");
        }
    }

    #[test]
    fn what_a_later_version_adds_is_passed_over() {
        let text = r#"{"t":"later","n":3,"ms":4,"x":[1]"#;
        let line = format!("{text},\"c\":\"{:08x}\"}}", crc32c::crc32c(text.as_bytes()));
        let entry = parse(line.as_bytes()).unwrap();
        assert_eq!((entry.n, entry.record), (3, Record::Unknown));
    }
}
