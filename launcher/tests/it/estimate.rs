//! `accel-launch estimate-memory`.

use std::fs;
use std::path::{Path, PathBuf};

use crate::support::{Ended, Folder};
use serde_json::{Value, json};

/// Writes a file with these tensors: name, type, shape and bytes. The data after the header is a hole, which takes no
/// space on the disk.
fn model(folder: &Path, name: &str, tensors: &[(&str, &str, &[u64], u64)]) -> PathBuf {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut at = 0;
    for (name, dtype, shape, bytes) in tensors {
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [at, at + bytes]});
        header.insert((*name).to_owned(), entry);
        at += bytes;
    }
    let header = serde_json::to_vec(&header).unwrap();
    let path = folder.join(name);
    fs::write(
        &path,
        [&(header.len() as u64).to_le_bytes()[..], &header].concat(),
    )
    .unwrap();
    resize(&path, 8 + header.len() as u64 + at);
    path
}

fn resize(path: &Path, bytes: u64) {
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(bytes).unwrap();
}

fn estimate(path: &Path, more: &str) -> Ended {
    Folder::new().launch(&format!("estimate-memory {} {more}", path.display()))
}

#[test]
fn parameters_gradients_and_optimizers_are_added_up() {
    let folder = Folder::new();
    // The file has a million weights as f32, half a million as bf16, and a counter.
    let path = model(
        folder.path(),
        "model.safetensors",
        &[
            ("a.weight", "F32", &[1000, 1000], 4_000_000),
            ("b.weight", "BF16", &[500, 1000], 1_000_000),
            ("steps", "I64", &[], 8),
        ],
    );
    let report = estimate(&path, "--json").expect(0).json();
    assert_eq!(report["tensors"], 3);
    assert_eq!(report["elements"], 1_500_001);
    assert_eq!(report["parameters"], 5_000_008);
    assert_eq!(report["gradients"], 5_000_000);
    assert_eq!(report["buckets"], 6_000_000);
    let optimizers = json!({"sgd": 0, "sgd_momentum": 5_000_000, "adam": 10_000_000});
    assert_eq!(report["optimizers"], optimizers);
    assert_eq!(report["totals"]["inference"], 5_000_008);
    assert_eq!(report["totals"]["adam"], 26_000_008);
    assert_eq!(report["dtypes"][0]["dtype"], "F32");
    assert_eq!(report["dtypes"][2]["trained"], false);
    assert_eq!(report["left_out"], json!(["activations"]));

    estimate(&path, "")
        .expect(0)
        .prints("BF16")
        .prints("I64 (not trained)")
        .prints("24.8 MiB")
        .prints("Left out: activations");
}

#[test]
fn units_are_divided_among_processes() {
    let folder = Folder::new();
    let path = model(
        folder.path(),
        "model.safetensors",
        &[
            ("embedding.weight", "F32", &[100], 400),
            ("layers.0.a.weight", "F32", &[1000], 4000),
            ("layers.0.b.0.weight", "F32", &[500], 2000),
            ("layers.1.a.weight", "F32", &[1000], 4000),
            ("layers.1.steps", "I64", &[], 8),
        ],
    );
    let report = estimate(&path, "--json").expect(0).json();
    assert!(report.get("sharded").is_none());
    let report = estimate(&path, "--shards 4 --json").expect(0).json();
    let sharded = &report["sharded"];
    assert_eq!(
        (&sharded["processes"], &sharded["units"]),
        (&json!(4), &json!(2))
    );
    assert_eq!(sharded["largest_unit"], 6000);
    // The embedding and the counter are whole; 10,000 bytes of units are divided by four.
    assert_eq!(sharded["totals"]["inference"], 408 + 2500 + 2 * 6000);
    assert_eq!(
        sharded["totals"]["adam"],
        408 + 4 * 400 + 5 * 2500 + 4 * 6000
    );
    estimate(&path, "--shards 4")
        .expect(0)
        .prints("Of each of 4 processes, over which 2 units are sharded");
    estimate(&path, "--shards 0").expect(2);
}

#[test]
fn an_index_is_the_sum_of_its_shards() {
    let folder = Folder::new();
    model(
        folder.path(),
        "m-1-of-2.safetensors",
        &[("a", "F16", &[10], 20)],
    );
    model(
        folder.path(),
        "m-2-of-2.safetensors",
        &[("b", "F64", &[3], 24)],
    );
    let map = json!({"a": "m-1-of-2.safetensors", "b": "m-2-of-2.safetensors"});
    let index = |map: &Value| {
        let text = json!({"metadata": {"total_size": 44}, "weight_map": map}).to_string();
        folder.write("m.safetensors.index.json", &text)
    };
    let report = estimate(&index(&map), "--json").expect(0).json();
    assert_eq!(
        (&report["elements"], &report["parameters"]),
        (&json!(13), &json!(44))
    );

    for (map, part) in [
        (
            json!({"c": "m-1-of-2.safetensors"}),
            "`c` is in `m-1-of-2.safetensors`",
        ),
        (json!({"a": "../m-1-of-2.safetensors"}), "files beside it"),
        (json!({"a": "m-3.safetensors"}), "m-3.safetensors"),
        // This is an index of indices that includes itself.
        (
            json!({"a": "m.safetensors.index.json"}),
            "is no safetensors file",
        ),
    ] {
        estimate(&index(&map), "").expect(2).says(part);
    }
}

#[test]
fn a_file_of_another_length_than_its_header_says_is_refused() {
    let folder = Folder::new();
    let tensors: &[(&str, &str, &[u64], u64)] = &[("a", "F32", &[10], 40), ("b", "I8", &[2], 2)];
    let path = model(folder.path(), "model.safetensors", tensors);
    let whole = fs::metadata(&path).unwrap().len();
    estimate(&path, "").expect(0);
    // All data is missing, one byte is missing, or there is one byte too many.
    for (bytes, is_cut) in [(whole - 42, true), (whole - 1, true), (whole + 1, false)] {
        resize(&path, bytes);
        let ended = estimate(&path, "").expect(2).says(&format!(
            "a file of {whole} bytes (42 of them data), and it has {bytes}"
        ));
        assert_eq!(ended.stderr.contains("cut off"), is_cut, "{ended:?}");
    }
    // The same holds if an index names the file.
    resize(&path, whole - 1);
    let map = json!({"weight_map": {"a": "model.safetensors"}});
    let index = folder.write("m.safetensors.index.json", &map.to_string());
    estimate(&index, "")
        .expect(2)
        .says("model.safetensors is no safetensors file")
        .says("cut off");
}

#[test]
fn control_characters_in_a_file_are_escaped() {
    let folder = Folder::new();
    let path = model(
        folder.path(),
        "x.safetensors",
        &[("a", "F\u{1b}[31mX", &[2], 8), ("b\u{7}", "I8", &[2], 2)],
    );
    estimate(&path, "").expect(0).prints("F\\u{1b}[31mX");
    let path = model(
        folder.path(),
        "y.safetensors",
        &[("\u{1b}c", "I8", &[2], 3)],
    );
    estimate(&path, "")
        .expect(2)
        .says("`\\u{1b}c` of I8 has the shape [2], and 3 bytes");
    let path = folder.path().join("z.safetensors.index.json");
    for map in [json!({"a": "\u{1b}c"}), json!({"\u{1b}c": "x.safetensors"})] {
        fs::write(&path, json!({"weight_map": map}).to_string()).unwrap();
        estimate(&path, "").expect(2).says("`\\u{1b}c`");
    }
    let ended = estimate(&path, "");
    assert!(!(ended.text() + &ended.stderr).contains('\u{1b}'));
}

#[test]
fn an_index_that_is_too_long_is_not_read() {
    let folder = Folder::new();
    let path = folder.path().join("m.safetensors.index.json");
    // The file takes no space on the disk.
    fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
    estimate(&path, "").expect(2).says("at most 100000000");
}

#[test]
fn files_other_than_safetensors_are_refused() {
    let folder = Folder::new();
    let long = [&u64::MAX.to_le_bytes()[..], b"{}"].concat();
    let huge = r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}"#;
    let header = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let huge = header(huge);
    let one = r#"{"dtype":"I8","shape":[1],"data_offsets":[0,1]}"#;
    for (bytes, part) in [
        (&b"short"[..], "5 bytes"),
        (&long, "announce a header"),
        (&[&2_u64.to_le_bytes()[..], b"[]"].concat(), "its header"),
        (&huge, "`a` has the shape"),
        (&header(r#"{"a":3}"#), "the tensor `a`: invalid type"),
        (
            &header(&format!(r#"{{"a":{one},"a":{one}}}"#)),
            "`a` is there twice",
        ),
        (
            &header(&format!(r#"{{"a":{one}}} {{}}"#)),
            "trailing characters",
        ),
        (&header(r#"{"a":"#), "`a`: EOF"),
    ] {
        let path = folder.path().join("x.safetensors");
        fs::write(&path, bytes).unwrap();
        estimate(&path, "").expect(2).says(part);
    }
    for (path, part) in [
        (folder.path(), "is a folder"),
        (Path::new("/nowhere"), "cannot read"),
        (Path::new("/dev/tty"), "is no regular file"),
    ] {
        estimate(path, "").expect(2).says(part);
    }
}

#[test]
fn a_folder_of_checkpoints_tells_which_file_may_be_meant() {
    let folder = tempfile::tempdir().unwrap();
    for number in [1, 2] {
        let checkpoint = folder.path().join(format!("checkpoint-00000{number}"));
        fs::create_dir(&checkpoint).unwrap();
        model(&checkpoint, "model.safetensors", &[("a", "F32", &[2], 8)]);
    }
    estimate(folder.path(), "")
        .expect(2)
        .says("checkpoint-000002/model.safetensors");
}
