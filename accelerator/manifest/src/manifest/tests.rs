//! Changed manifests, with and without a valid seal.

use proptest::prelude::*;
use serde_json::json;

use super::{DEEPEST, MOST_VALUES, *};

fn manifest() -> Manifest {
    let mut metadata = Metadata::new(NonZeroUsize::MIN);
    metadata.extra.insert("rate".to_owned(), json!(0.1 + 0.2));
    metadata.loaders.push(LoaderState {
        samples: 1000,
        order: "shuffled".to_owned(),
        tail: "exact".to_owned(),
        global_batch: 32,
        epoch: 1,
        consumed: 64,
        step: 2,
        finished: false,
        extra: serde_json::Map::new(),
    });
    let entry = FileEntry {
        bytes: 3,
        blake3: ContentHash::of(b"abc"),
        role: Role::Model,
    };
    Manifest {
        format: Manifest::FORMAT,
        number: 3,
        created: 1_800_000_000,
        library: "0.1.0".to_owned(),
        metadata,
        files: BTreeMap::from([("model.bin".parse().unwrap(), entry)]),
    }
}

/// Returns the bytes of a manifest that was changed and sealed again.
fn forged(change: impl FnOnce(&mut serde_json::Value)) -> Vec<u8> {
    let mut value = serde_json::to_value(manifest()).unwrap();
    change(&mut value);
    let mut bytes = serde_json::to_vec(&value).unwrap();
    bytes.pop();
    seal(&mut bytes);
    bytes
}

#[test]
fn what_is_written_can_be_read_and_is_json() {
    let bytes = manifest().to_bytes().unwrap();
    assert_eq!(Manifest::parse(&bytes).unwrap(), manifest());
    let value: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(value["loaders"][0]["consumed"], 64);
    assert_eq!(value["world_size"], 1);
    assert_eq!(value["seal"].as_str().unwrap().len(), 64);
}

#[test]
fn every_flipped_bit_and_every_cut_is_found() {
    let bytes = manifest().to_bytes().unwrap();
    for bit in 0..bytes.len() * 8 {
        let mut spoilt = bytes.clone();
        spoilt[bit / 8] ^= 1 << (bit % 8);
        assert!(
            Manifest::parse(&spoilt).unwrap_err().is_corrupt(),
            "bit {bit}"
        );
    }
    for len in 0..bytes.len() {
        assert!(
            Manifest::parse(&bytes[..len]).unwrap_err().is_corrupt(),
            "{len} bytes"
        );
    }
}

#[test]
fn newer_formats_are_refused_and_newer_fields_are_not() {
    let newer = forged(|x| x["format"] = json!(2));
    let error = Manifest::parse(&newer).unwrap_err();
    assert!(
        error.is_incompatible() && error.to_string().contains("format 2"),
        "{error}"
    );
    let more = forged(|x| {
        x["colour"] = json!("green");
        x["files"]["model.bin"]["role"] = json!("tokenizer");
    });
    assert_eq!(
        Manifest::parse(&more)
            .unwrap()
            .files
            .values()
            .next()
            .unwrap()
            .role,
        Role::Other
    );
}

#[test]
fn what_cannot_be_is_refused_though_it_is_sealed() {
    let entry = json!({"bytes": 1, "blake3": "0".repeat(64), "role": "other"});
    let file = |name: &str| {
        let (name, entry) = (name.to_owned(), entry.clone());
        forged(move |x| x["files"][name] = entry)
    };
    for bytes in [
        file("../escape"),
        file("/etc/passwd"),
        file("manifest.json"),
        file("model.bin/below"),
        forged(|x| x["world_size"] = json!(0)),
        forged(|x| x["step"] = json!(-1)),
        forged(|x| x["files"]["model.bin"]["blake3"] = json!("abc")),
        forged(|x| {
            x["files"]["other"] =
                json!({"bytes": u64::MAX, "blake3": "0".repeat(64), "role": "other"})
        }),
        forged(|x| *x = json!({"format": 1})),
    ] {
        assert!(Manifest::parse(&bytes).unwrap_err().is_corrupt());
    }
    let mut many = manifest();
    let entry = many.files.values().next().unwrap().clone();
    many.files = (0..=Manifest::MOST_FILES)
        .map(|x| (format!("f{x}").parse().unwrap(), entry.clone()))
        .collect();
    assert!(many.to_bytes().unwrap_err().is_misuse());
}

#[test]
fn more_than_can_be_is_refused_before_memory_is_taken() {
    let list = |count: usize| vec![json!(0); count].into();
    let nested = |depth: usize| (0..depth).fold(json!(0), |inner, _| json!([inner]));
    // The values and levels that the known fields take.
    let (others, above) = (100, 2);
    for (extra, says) in [
        (list(MOST_VALUES), Some("1048576 values")),
        (nested(DEEPEST), Some("64 deep")),
        (list(MOST_VALUES - others), None),
        (nested(DEEPEST - above), None),
    ] {
        let parsed = Manifest::parse(&forged(|x| x["extra"]["more"] = extra.clone()));
        let mut written = manifest();
        written.metadata.extra.insert("more".to_owned(), extra);
        let written = written.to_bytes();
        match says {
            None => assert_eq!(parsed.unwrap(), Manifest::parse(&written.unwrap()).unwrap()),
            Some(says) => {
                let (read, wrote) = (parsed.unwrap_err(), written.unwrap_err());
                assert!(
                    read.is_corrupt() && read.to_string().contains(says),
                    "{read}"
                );
                assert!(
                    wrote.is_misuse() && wrote.to_string().contains(says),
                    "{wrote}"
                );
            }
        }
    }
    // Unknown fields are skipped, whatever their names.
    let known = Manifest::parse(&forged(|x| x["metadata"] = json!({"step": 7}))).unwrap();
    assert_eq!(known, manifest());
}

proptest! {
    #[test]
    fn numbers_come_back_bit_for_bit(rate in any::<f64>(), seed in any::<u64>(), step in any::<u64>()) {
        prop_assume!(rate.is_finite());
        let mut written = manifest();
        written.metadata.extra.insert("rate".to_owned(), json!(rate));
        written.metadata.seed = Some(seed);
        written.metadata.step = step;
        let read = Manifest::parse(&written.to_bytes().unwrap()).unwrap();
        prop_assert_eq!(read.metadata.extra["rate"].as_f64().unwrap().to_bits(), rate.to_bits());
        prop_assert_eq!((read.metadata.seed, read.metadata.step), (Some(seed), step));
    }

    #[test]
    fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        fuzz_manifest(&bytes);
    }

    #[test]
    fn spoilt_manifests_never_panic(at in 0..600_usize, with in prop::collection::vec(any::<u8>(), 0..4), cut in 0..4_usize) {
        let mut body = serde_json::to_vec(&manifest()).unwrap();
        body.pop();
        let at = at % body.len();
        let end = (at + cut).min(body.len());
        body.splice(at..end, with);
        fuzz_manifest(&body);
    }
}

#[test]
fn what_stands_in_texts_is_no_value() {
    let many = "[,{\\\"".repeat(MOST_VALUES);
    assert_eq!(
        check_bounds(format!("{{\"{many}\": \"{many}\"}}").as_bytes()),
        Ok(())
    );
}
