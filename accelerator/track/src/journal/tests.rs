use std::fs;
use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::error::Result;
use crate::history::RunHistory;
use crate::record::{EndStatus, Entry, Record};
use crate::sink::Delivery;
use crate::tests::{assert_says, end};

fn metrics(step: u64, value: f64) -> Record {
    crate::tests::metrics(step, None, [value])
}

fn write(path: &Path, records: impl IntoIterator<Item = Record>) -> JournalWriter {
    let mut writer = match path.exists() {
        true => JournalWriter::open(path, |_| {}).unwrap(),
        false => JournalWriter::create(path).unwrap(),
    };
    for record in records {
        writer.append(1, record);
    }
    writer.flush().unwrap();
    writer
}

fn read(path: &Path, delivery: Delivery) -> Result<Vec<Entry>> {
    match Follower::open(path, delivery)?.poll(usize::MAX)? {
        Followed::Entries(entries) => Ok(entries),
        Followed::Superseded => panic!("nothing was given before"),
    }
}

fn points(path: &Path, delivery: Delivery) -> Vec<(u64, f64)> {
    let entries = read(path, delivery).unwrap().into_iter();
    entries
        .filter_map(|entry| match entry.record {
            Record::Metrics(metrics) => Some((metrics.step, metrics.points[0].value.0)),
            _ => None,
        })
        .collect()
}

#[test]
fn a_torn_tail_is_dropped_at_every_byte_and_writing_continues() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("j");
    write(&path, [metrics(1, 1.0), metrics(2, 2.0)]);
    let whole = fs::read(&path).unwrap();
    let last = whole[..whole.len() - 1]
        .iter()
        .rposition(|&x| x == b'\n')
        .unwrap()
        + 1;
    for length in last..whole.len() {
        fs::write(&path, &whole[..length]).unwrap();
        assert_eq!(points(&path, Delivery::Live), [(1, 1.0)], "{length}");
        write(&path, [metrics(3, 3.0)]);
        assert_eq!(points(&path, Delivery::Live), [(1, 1.0), (3, 3.0)]);
    }
}

#[test]
fn damage_within_is_named_by_its_byte() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("j");
    write(&path, (0..5).map(|step| metrics(step, 0.0)));
    let mut bytes = fs::read(&path).unwrap();
    let second = bytes.iter().position(|&x| x == b'\n').unwrap() + 1;
    bytes[second + 20] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let error = read(&path, Delivery::Live).unwrap_err();
    assert!(error.is_corrupt());
    assert_says(&error, &format!("byte {second} "));
    assert!(JournalWriter::open(&path, |_| {}).unwrap_err().is_corrupt());
}

#[test]
fn a_resume_supersedes_greater_steps_and_repeated_ones() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("j");
    write(&path, (1..=3).map(|step| metrics(step, 1.0)));
    write(
        &path,
        [Record::Checkpoint {
            step: Some(3),
            covers: 3,
        }],
    );
    write(&path, [metrics(4, 1.0), metrics(5, 1.0), metrics(2, 7.0)]);
    assert_eq!(points(&path, Delivery::Settled).len(), 3);
    let mut live = Follower::open(&path, Delivery::Live).unwrap();
    assert!(matches!(live.poll(100).unwrap(), Followed::Entries(x) if x.len() == 7));
    write(&path, [Record::Rewind { to: Some(3) }]);
    assert!(matches!(live.poll(100).unwrap(), Followed::Entries(x) if x.len() == 1));
    write(&path, [metrics(4, 2.0), metrics(3, 2.0)]);
    assert!(matches!(live.poll(100).unwrap(), Followed::Superseded));
    assert_eq!(
        points(&path, Delivery::Live),
        [(1, 1.0), (2, 1.0), (2, 7.0), (4, 2.0), (3, 2.0)]
    );
    // The next attempt starts from the beginning.
    write(&path, [Record::Rewind { to: None }, metrics(1, 3.0)]);
    assert_eq!(points(&path, Delivery::Live), [(1, 3.0)]);
}

#[test]
fn an_attempt_that_logs_nothing_supersedes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("j");
    let to = |to| Record::Rewind { to };
    let attempt = || Record::Attempt {
        attempt: 1,
        world: 1,
        launch: None,
        provenance: serde_json::Value::Null,
    };
    write(&path, (1..=4).map(|step| metrics(step, 1.0)));
    // One program dies before it resumes, and one fails after it has resumed.
    let failed = end(EndStatus::Failed);
    write(&path, [attempt(), to(None)]);
    write(&path, [attempt(), to(None), to(Some(1)), failed]);
    let all = [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0)];
    assert_eq!(points(&path, Delivery::Live), all);
    // The third resumes from a later checkpoint than either, and logs.
    write(&path, [attempt(), to(None), to(Some(3)), metrics(4, 2.0)]);
    let resumed = [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)];
    assert_eq!(points(&path, Delivery::Live), resumed);
}

#[test]
fn the_end_of_a_run_that_may_go_on_settles_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("j");
    let checkpoint = |step, covers| Record::Checkpoint {
        step: Some(step),
        covers,
    };
    write(&path, [metrics(1, 1.0), checkpoint(1, 1), metrics(2, 1.0)]);
    write(&path, [end(EndStatus::Failed)]);
    let mut follower = Follower::open(&path, Delivery::Settled).unwrap();
    let mut numbers = || match follower.poll(usize::MAX).unwrap() {
        Followed::Entries(entries) => Some(entries.iter().map(|x| x.n).collect::<Vec<_>>()),
        Followed::Superseded => None,
    };
    assert_eq!(numbers().unwrap(), [0]);
    assert_eq!(numbers().unwrap(), [3]);
    assert!(numbers().unwrap().is_empty());
    write(&path, [Record::Rewind { to: Some(1) }, metrics(2, 2.0)]);
    write(&path, [end(EndStatus::Finished)]);
    assert!(numbers().is_none());
    assert_eq!(numbers().unwrap(), [0, 1, 3, 4, 5, 6]);
}

#[test]
fn a_follower_gives_each_entry_once_while_it_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("j");
    let mut writer = JournalWriter::create(&path).unwrap();
    let mut follower = Follower::open(&path, Delivery::Live).unwrap();
    let mut seen = Vec::new();
    for step in 0..100 {
        writer.append(0, metrics(step, 0.0));
        writer.flush().unwrap();
        if step % 7 == 0 {
            let Followed::Entries(entries) = follower.poll(5).unwrap() else {
                panic!("nothing was superseded");
            };
            seen.extend(entries.iter().map(|x| x.n));
        }
    }
    while let Followed::Entries(entries) = follower.poll(5).unwrap() {
        if entries.is_empty() {
            break;
        }
        seen.extend(entries.iter().map(|x| x.n));
    }
    assert_eq!(seen, (0..100).collect::<Vec<_>>());
}

#[test]
fn what_is_no_journal_is_told_from_an_empty_one_and_from_a_newer_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(JOURNAL);
    let error = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let error = RunHistory::read(folder.path()).unwrap_err();
        // A program that cannot read the journal does not write to it.
        let _ = JournalWriter::open(&path, |_| {});
        error
    };
    assert!(error(b"").is_not_found());
    for rubbish in [&b"rubbish"[..], b"rub\nbish\n", &[0; 4096]] {
        let error = error(rubbish);
        assert!(error.is_corrupt());
        assert_says(&error, "no journal");
    }
    // Only the version of this head can be understood.
    let text = r#"{"t":"head","n":0,"ms":1,"version":2,"runs":["a"]"#;
    let line = format!(
        "{text},\"c\":\"{:08x}\"}}\n",
        crc32c::crc32c(text.as_bytes())
    );
    let error = error(line.as_bytes());
    assert!(error.is_incompatible(), "{error}");
    assert_eq!(fs::read(&path).unwrap(), line.as_bytes());
}

proptest! {
    /// A run that is killed and resumed at any steps ends with the points of an undisturbed one.
    #[test]
    fn a_run_with_kills_has_the_points_of_an_undisturbed_one(kills in prop::collection::vec((1u64..12, 0u64..4), 0..6)) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("j");
        let mut writer = JournalWriter::create(&path).unwrap();
        let mut saved = 0;
        // Each attempt logs `steps` steps, saves every third, and loses the last bytes.
        for (attempt, &(steps, torn)) in kills.iter().chain([&(40, 0)]).enumerate() {
            if attempt > 0 {
                writer.append(0, Record::Rewind { to: Some(saved).filter(|&x| x > 0) });
            }
            for step in saved + 1..=(saved + steps).min(30) {
                writer.append(0, metrics(step, step as f64));
                if step % 3 == 0 {
                    writer.flush().unwrap();
                    let covers = writer.next();
                    writer.append(0, Record::Checkpoint { step: Some(step), covers });
                    writer.flush().unwrap();
                    saved = step;
                }
            }
            writer.flush().unwrap();
            drop(writer);
            let bytes = fs::read(&path).unwrap();
            fs::write(&path, &bytes[..bytes.len() - torn as usize]).unwrap();
            writer = JournalWriter::open(&path, |_| {}).unwrap();
        }
        let expected: Vec<_> = (1..=30).map(|step| (step, step as f64)).collect();
        prop_assert_eq!(points(&path, Delivery::Live), expected);
    }
}
