//! Model files: in one piece or in shards, for Burn or for PyTorch, and the parts of them that fit a model.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::checkpoints::names;
use crate::common::{assert_chain, devices, flat};
use accelerator::model::{FileLayout, LoadOptions, SaveOptions};
use accelerator::prelude::*;
use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, LinearLayout};
use burn::store::{ModuleSnapshot, SafetensorsStore};
use burn::tensor::{Bool, Device, Distribution, Int, Tensor, TensorData};
use safetensors::SafeTensors;

#[derive(Debug, Module)]
struct Net {
    conv: Conv2d,
    norm: BatchNorm,
    output: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            conv: Conv2dConfig::new([1, 2], [3, 3]).init(device),
            norm: BatchNormConfig::new(2).init(device),
            output: LinearConfig::new(8, 3).init(device),
        }
    }

    /// Returns a net whose running statistics have moved.
    fn trained(device: &Device) -> Self {
        let net = Self::new(device);
        let pictures = Tensor::random([4, 1, 4, 4], Distribution::Default, device);
        net.norm.forward(net.conv.forward(pictures));
        net
    }
}

/// The names of the net's tensors in Burn's layout.
const NAMES: [&str; 8] = [
    "conv.weight",
    "conv.bias",
    "norm.gamma",
    "norm.beta",
    "norm.running_mean",
    "norm.running_var",
    "output.weight",
    "output.bias",
];

fn alone() -> Accelerator {
    Accelerator::new().unwrap()
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// Returns a folder, the path of a model file in it, a single rank and its device.
fn setup() -> (tempfile::TempDir, PathBuf, Accelerator, Device) {
    let (folder, accelerator) = (folder(), alone());
    let path = folder.path().join("model.safetensors");
    let device = accelerator.device();
    (folder, path, accelerator, device)
}

fn index_of(path: &Path) -> (u64, BTreeMap<String, String>) {
    let text = std::fs::read_to_string(path).unwrap();
    let index: serde_json::Value = serde_json::from_str(&text).unwrap();
    let map = serde_json::from_value(index["weight_map"].clone()).unwrap();
    (index["metadata"]["total_size"].as_u64().unwrap(), map)
}

#[test]
fn a_large_model_is_written_in_shards_and_read_back_bit_for_bit() {
    let (folder, path, accelerator, device) = setup();
    let net = Net::trained(&device);
    // The shards have 72 + 8, 8 + 8 + 8 + 8, 96 and 12 bytes.
    let options = SaveOptions::new().with_max_shard_size(80);
    accelerator.save_model_with(&net, &path, &options).unwrap();

    let shard = |number| format!("model-{number:05}-of-00004.safetensors");
    let mut expected: Vec<_> = (1..=4).map(shard).collect();
    expected.push("model.safetensors.index.json".to_owned());
    assert_eq!(names(folder.path()), expected);
    let (total, map) = index_of(&folder.path().join(&expected[4]));
    assert_eq!(total, 72 + 8 + 4 * 8 + 96 + 12);
    assert_eq!(map.len(), NAMES.len());
    assert_eq!(map["conv.bias"], shard(1));
    assert_eq!(map["norm.running_var"], shard(2));
    assert_eq!(map["output.weight"], shard(3));
    assert_eq!(map["output.bias"], shard(4));

    for named in [
        path.clone(),
        folder.path().to_owned(),
        folder.path().join(&expected[4]),
    ] {
        let other = accelerator.load_model(Net::new(&device), &named).unwrap();
        assert_eq!(flat(&other), flat(&net.valid()), "{}", named.display());
    }
}

#[test]
fn a_small_model_is_one_file_that_burn_reads() {
    for kind in devices() {
        let folder = folder();
        let path = folder.path().join("model.safetensors");
        let accelerator = Accelerator::builder().device(kind).build().unwrap();
        let device = accelerator.device();
        let net = accelerator.prepare(Net::trained(&device)).unwrap();
        let options = SaveOptions::new().with_max_shard_size(1 << 20);
        accelerator.save_model_with(&net, &path, &options).unwrap();
        assert_eq!(names(folder.path()), ["model.safetensors"]);
        let loaded = accelerator.load_model(Net::new(&device), &path).unwrap();
        assert_eq!(flat(&loaded), flat(&net.valid()));

        let mut other = Net::new(&device);
        let mut store = SafetensorsStore::from_file(&path);
        other.load_from(&mut store).unwrap();
        assert_eq!(flat(&other), flat(&net.valid()));

        let back = folder.path().join("back.safetensors");
        let mut store = SafetensorsStore::from_file(&back);
        other.save_into(&mut store).unwrap();
        let again = accelerator.load_model(Net::new(&device), &back).unwrap();
        assert_eq!(flat(&again), flat(&net.valid()));
    }
}

#[test]
fn a_folder_of_checkpoints_is_read_as_its_newest_good_one() {
    let folder = folder();
    let accelerator = alone();
    let device = accelerator.device();
    let nets = [Net::new(&device), Net::trained(&device)];
    let nets = nets.map(|net| accelerator.prepare(net).unwrap());
    for net in &nets {
        accelerator.save_state(folder.path(), net).unwrap();
    }
    let loaded = || {
        flat(
            &accelerator
                .load_model(Net::new(&device), folder.path())
                .unwrap(),
        )
    };
    assert_ne!(flat(&nets[0].valid()), flat(&nets[1].valid()));
    assert_eq!(loaded(), flat(&nets[1].valid()));
    let newest = folder.path().join("checkpoint-000002/model.safetensors");
    std::fs::write(newest, "damaged").unwrap();
    assert_eq!(loaded(), flat(&nets[0].valid()));
}

#[test]
fn a_manifest_of_another_program_beside_a_model_is_not_a_checkpoints() {
    let folder = folder();
    let path = folder.path().join("model.safetensors");
    let device = alone().device();
    let net = Net::trained(&device);
    alone().save_model(&net, &path).unwrap();
    let foreign = r#"{"manifest_version": 3, "name": "a page"}"#;
    for text in [foreign, "{}", "[", r#"{"format": 99}"#] {
        std::fs::write(folder.path().join("manifest.json"), text).unwrap();
        for named in [folder.path(), &path] {
            let loaded = alone().load_model(Net::new(&device), named).unwrap();
            assert_eq!(flat(&loaded), flat(&net.valid()), "{text}");
        }
    }
    // A folder that was a checkpoint stays one under any name.
    std::fs::write(folder.path().join("state.cbor"), "").unwrap();
    let error = alone().load_model(Net::new(&device), folder.path());
    assert!(error.unwrap_err().is_checkpoint());
}

#[test]
fn what_an_older_save_left_goes_when_the_next_is_complete() {
    let (folder, path, accelerator, device) = setup();
    let stranger = "model-final-00001-of-00002.safetensors";
    std::fs::write(folder.path().join(stranger), "not ours").unwrap();
    let save = |net: &Net, size| {
        let options = SaveOptions::new().with_max_shard_size(size);
        accelerator.save_model_with(net, &path, &options).unwrap();
        let loaded = accelerator.load_model(Net::new(&device), &path).unwrap();
        assert_eq!(flat(&loaded), flat(&net.valid()), "shards of {size} bytes");
    };
    let shards = || {
        let names = names(folder.path());
        names.iter().filter(|name| name.contains("-of-")).count() - 1
    };
    // The number of shards grows, stays, falls to one file, and grows again.
    for (size, expected) in [(120, 2), (80, 4), (80, 4), (0, 0), (120, 2), (1 << 20, 0)] {
        save(&Net::trained(&device), size);
        assert_eq!(shards(), expected, "{:?}", names(folder.path()));
    }
    assert_eq!(names(folder.path()), [stranger, "model.safetensors"]);
}

/// Two jobs save to one path at the same time, as if one had been started by mistake.
#[test]
fn two_jobs_that_save_to_one_path_leave_the_model_of_one_of_them() {
    for options in [
        SaveOptions::new(),
        SaveOptions::new().with_max_shard_size(80),
    ] {
        let folder = folder();
        let path = &folder.path().join("model.safetensors");
        let device = alone().device();
        let models = [Net::trained(&device), Net::trained(&device)];
        std::thread::scope(|scope| {
            for net in &models {
                let options = &options;
                scope.spawn(move || {
                    let accelerator = alone();
                    for _ in 0..10 {
                        accelerator.save_model_with(net, path, options).unwrap();
                    }
                });
            }
        });
        let saved = alone().load_model(Net::new(&device), path).unwrap();
        let saved = flat(&saved);
        assert!(models.iter().any(|net| flat(&net.valid()) == saved));
        let names = names(folder.path());
        assert!(!names.iter().any(|name| name.starts_with('.')), "{names:?}");
    }
}

#[test]
fn an_index_is_never_left_beside_shards_of_two_saves() {
    let (folder, path, accelerator, device) = setup();
    let options = SaveOptions::new().with_max_shard_size(80);
    accelerator
        .save_model_with(&Net::new(&device), &path, &options)
        .unwrap();
    // The second shard cannot be moved into place after the first one was.
    let second = folder.path().join("model-00002-of-00004.safetensors");
    std::fs::remove_file(&second).unwrap();
    std::fs::create_dir(&second).unwrap();
    std::fs::write(second.join("file"), "").unwrap();
    let error = accelerator
        .save_model_with(&Net::new(&device), &path, &options)
        .unwrap_err();
    assert!(error.is_io(), "{error:?}");
    assert!(!folder.path().join("model.safetensors.index.json").exists());
    let error = accelerator
        .load_model(Net::new(&device), &path)
        .unwrap_err();
    let words = ["no such file", "model.safetensors.index.json"];
    assert_chain(&error, Error::is_io, &words);
}

#[test]
fn pytorchs_layout_turns_linear_weights_and_renames_norms() {
    let (_folder, path, accelerator, device) = setup();
    let net = Net::trained(&device);
    let options = SaveOptions::new().with_layout(FileLayout::PyTorch);
    accelerator.save_model_with(&net, &path, &options).unwrap();

    let bytes = std::fs::read(&path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut names = tensors.names();
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "conv.bias",
            "conv.weight",
            "norm.bias",
            "norm.running_mean",
            "norm.running_var",
            "norm.weight",
            "output.bias",
            "output.weight"
        ]
    );
    let written = tensors.tensor("output.weight").unwrap();
    assert_eq!(written.shape(), [3, 8]);
    let turned = net.output.weight.val().inner().transpose().into_data();
    assert_eq!(written.data(), &turned.bytes()[..]);

    // The file states its layout.
    let loaded = accelerator.load_model(Net::new(&device), &path).unwrap();
    assert_eq!(flat(&loaded), flat(&net.valid()));
    let wrong = LoadOptions::new().with_layout(FileLayout::Burn);
    let error = accelerator
        .load_model_with(Net::new(&device), &path, &wrong)
        .unwrap_err();
    assert_chain(&error, Error::is_model, &["PyTorch", "Burn", "with_layout"]);
}

#[test]
fn column_major_weights_are_the_same_in_every_layout() {
    let folder = folder();
    let accelerator = alone();
    let device = accelerator.device();
    let config = LinearConfig::new(4, 3).with_layout(LinearLayout::Col);
    let column: Linear = config.init(&device);
    let weight = column.weight.val().into_data();
    for layout in [FileLayout::Burn, FileLayout::PyTorch] {
        let path = folder.path().join(format!("{layout:?}.safetensors"));
        let options = SaveOptions::new().with_layout(layout);
        accelerator
            .save_model_with(&column, &path, &options)
            .unwrap();
        let loaded: Linear = accelerator.load_model(config.init(&device), &path).unwrap();
        assert_eq!(loaded.weight.val().into_data(), weight, "{layout:?}");
    }
    // In PyTorch's layout, a row-major layer can load it as well.
    let path = folder.path().join("PyTorch.safetensors");
    let row: Linear = LinearConfig::new(4, 3).init(&device);
    let row = accelerator.load_model(row, &path).unwrap();
    assert_eq!(row.weight.val().into_data(), weight);
}

#[derive(Debug, Module)]
struct Mixed {
    flags: Param<Tensor<1, Bool>>,
    counts: Param<Tensor<1, Int>>,
    weights: Param<Tensor<1>>,
}

impl Mixed {
    fn new(device: &Device, flags: [bool; 3], counts: [i64; 2], weights: [f32; 2]) -> Self {
        let id = burn::module::ParamId::new;
        Self {
            flags: Param::initialized(id(), Tensor::from_data(flags, device)),
            counts: Param::initialized(id(), Tensor::from_data(counts, device)),
            weights: Param::from_data(weights, device),
        }
    }
}

#[test]
fn flags_and_counts_are_kept_and_lie_aligned() {
    let (_folder, path, accelerator, device) = setup();
    let model = Mixed::new(&device, [true, false, true], [-3, 1 << 20], [0.5, f32::NAN]);
    accelerator.save_model(&model, &path).unwrap();
    let other = Mixed::new(&device, [false; 3], [0; 2], [0.0; 2]);
    let other = accelerator.load_model(other, &path).unwrap();
    let bits = |model: &Mixed| {
        [
            model.flags.val().into_data().bytes().to_vec(),
            model.counts.val().into_data().bytes().to_vec(),
            model.weights.val().into_data().bytes().to_vec(),
        ]
    };
    assert_eq!(bits(&other), bits(&model));

    let file = std::fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let json: serde_json::Value = serde_json::from_slice(&file[8..header]).unwrap();
    assert_eq!(header % 8, 0);
    for (name, width) in [("counts", 8), ("weights", 4)] {
        let start = json[name]["data_offsets"][0].as_u64().unwrap();
        assert_eq!(start % width, 0, "{name} at {start}");
    }
}

#[test]
fn a_tied_parameter_is_written_once_while_it_is_one() {
    #[derive(Debug, Module)]
    struct Tied {
        first: Linear,
        second: Linear,
    }
    let (_folder, path, accelerator, device) = setup();
    let line = |bias| -> Linear { LinearConfig::new(64, 64).with_bias(bias).init(&device) };
    let first = line(false);
    let tied = Tied {
        second: first.clone(),
        first,
    };
    accelerator.save_model(&tied, &path).unwrap();
    let size = std::fs::metadata(&path).unwrap().len();
    assert!(size < 2 * 64 * 64 * 4, "{size} bytes");
    let fresh = || Tied {
        first: line(false),
        second: line(false),
    };
    let loaded = accelerator.load_model(fresh(), &path).unwrap();
    assert_eq!(flat(&loaded), flat(&tied));

    // After separate training they are two tensors.
    let mut apart = tied;
    let id = apart.second.weight.id;
    let moved = apart.second.weight.val().inner() + 1.0;
    apart.second.weight = Param::initialized(id, moved);
    accelerator.save_model(&apart, &path).unwrap();
    let loaded = accelerator.load_model(fresh(), &path).unwrap();
    assert_eq!(flat(&loaded), flat(&apart));
}

#[test]
fn everything_that_does_not_fit_is_listed_and_partial_loading_takes_the_rest() {
    #[derive(Debug, Module)]
    struct Other {
        conv: Conv2d,
        norm: BatchNorm,
        output: Linear,
        extra: Linear,
    }
    let (_folder, path, accelerator, device) = setup();
    let net = Net::trained(&device);
    accelerator.save_model(&net, &path).unwrap();
    let other = || Other {
        conv: Conv2dConfig::new([1, 2], [3, 3])
            .with_bias(false)
            .init(&device),
        norm: BatchNormConfig::new(2).init(&device),
        output: LinearConfig::new(8, 5).init(&device),
        extra: LinearConfig::new(5, 1).init(&device),
    };
    let error = accelerator.load_model(other(), &path).unwrap_err();
    assert_chain(
        &error,
        Error::is_model,
        &[
            "5 of 9 parameters",
            "2 missing from the file: `extra.weight`, `extra.bias`",
            "1 unexpected in the file: `conv.bias`",
            "2 misshapen: `output.weight` (expected [8, 5], found [8, 3])",
        ],
    );

    let before = other();
    let output = before.output.weight.val().into_data();
    let (loaded, report) = accelerator
        .load_model_with(before, &path, &LoadOptions::new().allow_partial())
        .unwrap();
    assert_eq!(report.missing, ["extra.weight", "extra.bias"]);
    assert_eq!(report.unexpected, ["conv.bias"]);
    assert_eq!(report.misshapen[1].name, "output.bias");
    assert_eq!(
        (&*report.misshapen[1].expected, &*report.misshapen[1].found),
        (&[5][..], &[3][..])
    );
    assert_eq!(report.loaded.len(), 5);
    assert_eq!(flat(&loaded.norm), flat(&net.norm.valid()));
    assert_eq!(loaded.output.weight.val().into_data(), output, "left alone");

    // A file that has nothing in common with the model is an error in any mode.
    let stranger: Linear = LinearConfig::new(2, 2).init(&device);
    let error = accelerator
        .load_model_with(stranger, &path, &LoadOptions::new().allow_partial())
        .unwrap_err();
    assert!(error.is_model());
}

#[test]
fn names_can_be_changed_on_the_way() {
    let (_folder, path, accelerator, device) = setup();
    #[derive(Debug, Module)]
    struct Outer {
        module: Net,
    }
    let outer = Outer {
        module: Net::trained(&device),
    };
    accelerator.save_model(&outer, &path).unwrap();
    let error = accelerator
        .load_model(Net::new(&device), &path)
        .unwrap_err();
    let words = ["strip_prefix(\"module.\")", "8 of the missing"];
    assert_chain(&error, Error::is_model, &words);

    let options = LoadOptions::new().strip_prefix("module.");
    let (loaded, report) = accelerator
        .load_model_with(Net::new(&device), &path, &options)
        .unwrap();
    assert!(report.is_complete());
    assert_eq!(flat(&loaded), flat(&outer.module.valid()));

    // A renamed tensor is not found under its old name.
    let away = options.clone().rename("conv.bias", "conv.shift");
    let error = accelerator
        .load_model_with(Net::new(&device), &path, &away)
        .unwrap_err();
    assert_chain(
        &error,
        Error::is_model,
        &["1 missing from the file: `conv.bias`", "module.conv.bias"],
    );

    let clash = options.rename_pattern("weight|bias", "same").unwrap();
    let error = accelerator
        .load_model_with(Net::new(&device), &path, &clash)
        .unwrap_err();
    assert_chain(
        &error,
        Error::is_config,
        &["module.conv.weight", "module.conv.bias", "conv.same"],
    );
}

#[test]
fn another_float_type_is_an_error_unless_a_cast_is_asked_for() {
    let (_folder, path, accelerator, device) = setup();
    // The values are 1.0 and -2.5 in bf16.
    let header = br#"{"weight":{"dtype":"BF16","shape":[2,1],"data_offsets":[0,4]}}"#;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend([0x80, 0x3f, 0x20, 0xc0]);
    std::fs::write(&path, file).unwrap();
    let line = || -> Linear { LinearConfig::new(2, 1).with_bias(false).init(&device) };
    let error = accelerator.load_model(line(), &path).unwrap_err();
    assert_chain(
        &error,
        Error::is_model,
        &["`weight` (expected f32, found bf16)"],
    );

    let options = LoadOptions::new().cast_floats();
    let (loaded, _) = accelerator
        .load_model_with(line(), &path, &options)
        .unwrap();
    assert_eq!(flat(&loaded), [1.0, -2.5]);
    assert!(loaded.weight.val().is_require_grad());
}

#[test]
fn every_rank_gets_rank_zeros_values_report_and_errors() {
    let folder = folder();
    let path = folder.path().join("model.safetensors");
    let saved = Net::trained(&alone().device());
    alone().save_model(&saved, &path).unwrap();
    let ranks = accelerator::launch(3, |accelerator| {
        let device = accelerator.device();
        let net = accelerator.init(Net::new);
        // Only rank 0 finds the file.
        let path = match accelerator.rank() {
            0 => path.clone(),
            _ => "/nonexistent".into(),
        };
        let (net, report) = accelerator.load_model_with(net, path, &LoadOptions::new())?;
        let net = accelerator.prepare(net)?;
        // A prepared model stays prepared.
        let again = accelerator.load_model(net.clone(), folder.path())?;
        assert_eq!(again.output.weight.id, net.output.weight.id);
        let wrong: Linear = LinearConfig::new(2, 2).init(&device);
        let unfit = accelerator.load_model(wrong, folder.path()).unwrap_err();
        let absent = accelerator
            .load_model(net.clone(), "/nonexistent")
            .unwrap_err();
        Ok((flat(&again), report, unfit, absent))
    })
    .unwrap();
    for (values, report, unfit, absent) in ranks {
        assert_eq!(values, flat(&saved.valid()));
        assert_eq!(report.loaded, NAMES);
        assert!(!unfit.is_io(), "{unfit:?}");
        assert_chain(&unfit, Error::is_model, &["2 missing", "`bias`"]);
        assert!(absent.is_io() && !absent.is_model(), "{absent:?}");
    }
}

#[test]
fn damaged_files_are_told_from_models_that_do_not_fit() {
    let (folder, path, accelerator, device) = setup();
    let options = SaveOptions::new().with_max_shard_size(80);
    let net = Net::trained(&device);
    accelerator.save_model(&net, &path).unwrap();
    let whole = std::fs::read(&path).unwrap();
    let load = || {
        accelerator
            .load_model(Net::new(&device), &path)
            .unwrap_err()
    };
    for kept in [0, 7, 8, 50, whole.len() - 1] {
        std::fs::write(&path, &whole[..kept]).unwrap();
        let error = load();
        assert_chain(&error, Error::is_io, &["model.safetensors"]);
    }
    std::fs::write(&path, [&whole[..], b"more"].concat()).unwrap();
    assert_chain(&load(), Error::is_io, &["accounts for"]);
    // The header claims to be as long as all memory.
    let mut huge = whole.clone();
    huge[..8].fill(0xff);
    std::fs::write(&path, &huge).unwrap();
    assert_chain(&load(), Error::is_io, &["announces a header"]);

    std::fs::remove_file(&path).unwrap();
    accelerator.save_model_with(&net, &path, &options).unwrap();
    let index = folder.path().join("model.safetensors.index.json");
    let good = std::fs::read_to_string(&index).unwrap();
    for (from, to, word) in [
        ("model-00002-of", "../model-00002-of", "beside it"),
        ("model-00002-of", "model-00001-of", "which has not"),
        ("model-00002-of", "model-00009-of", "model-00009-of"),
        ("weight_map", "weights", "not an index"),
    ] {
        std::fs::write(&index, good.replace(from, to)).unwrap();
        let error = load();
        assert_chain(&error, Error::is_io, &[word]);
    }
}

/// Runs a Python program that uses numpy and safetensors. Prints a line and returns `None` if there is no such Python.
fn python(program: &str, folder: &Path) -> Option<String> {
    let run = |program: &str| {
        Command::new("python3")
            .args(["-c", program])
            .current_dir(folder)
            .output()
    };
    let there = run("import numpy, safetensors").is_ok_and(|output| output.status.success());
    if !there {
        eprintln!("skipped: python3 has no numpy or no safetensors");
        return None;
    }
    let output = run(program).unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Some(String::from_utf8(output.stdout).unwrap())
}

#[test]
fn python_reads_what_is_written_here() {
    let folder = folder();
    let accelerator = alone();
    let net = Net::trained(&accelerator.device());
    let options = SaveOptions::new().with_layout(FileLayout::PyTorch);
    let save = |name, options: &SaveOptions| {
        let path = folder.path().join(name);
        accelerator.save_model_with(&net, path, options).unwrap();
    };
    save("one.safetensors", &options);
    save("many.safetensors", &options.clone().with_max_shard_size(80));
    let program = r#"
import json
from safetensors import safe_open
def tensors(name):
    with safe_open(name, framework="numpy") as f:
        assert f.metadata() == {"format": "pt", "layout": "pytorch"}, f.metadata()
        return {key: f.get_tensor(key) for key in f.keys()}
one = tensors("one.safetensors")
index = json.load(open("many.safetensors.index.json"))
many = {key: tensors(shard)[key] for key, shard in index["weight_map"].items()}
assert one.keys() == many.keys()
assert all((one[key] == many[key]).all() for key in one)
assert index["metadata"]["total_size"] == sum(value.nbytes for value in one.values())
weight = one["output.weight"]
print(json.dumps([list(weight.shape), weight.astype("f8").sum(), float(weight[2, 5]),
                  one["norm.running_var"].astype("f8").tolist()]))
"#;
    let Some(output) = python(program, folder.path()) else {
        return;
    };
    let found: (Vec<usize>, f64, f64, Vec<f64>) = serde_json::from_str(&output).unwrap();
    let weight = net.output.weight.val().inner();
    let values = weight
        .clone()
        .transpose()
        .into_data()
        .try_to_vec::<f32>()
        .unwrap();
    let sum: f64 = values.iter().map(|&value| f64::from(value)).sum();
    assert_eq!(found.0, [3, 8]);
    assert!((found.1 - sum).abs() < 1e-12, "{} and {sum}", found.1);
    assert_eq!(found.2, f64::from(values[2 * 8 + 5]));
    let variance = net.norm.valid().running_var.value().into_data();
    let variance: Vec<_> = variance.try_to_vec::<f32>().unwrap();
    let variance: Vec<_> = variance.into_iter().map(f64::from).collect();
    assert_eq!(found.3, variance);
}

#[test]
fn what_python_writes_is_read_here() {
    let folder = folder();
    let program = r#"
import json
import numpy as np
from safetensors.numpy import save_file
state = {
    "net.conv.weight": np.arange(18, dtype="f4").reshape(2, 1, 3, 3) / 7,
    "net.conv.bias": np.array([1, -1], dtype="f4"),
    "net.norm.weight": np.array([2, 3], dtype="f4"),
    "net.norm.bias": np.array([4, 5], dtype="f4"),
    "net.norm.running_mean": np.array([6, 7], dtype="f4"),
    "net.norm.running_var": np.array([8, 9], dtype="f4"),
    "net.norm.num_batches_tracked": np.array(3, dtype="i8"),
    "net.output.weight": np.arange(24, dtype="f4").reshape(3, 8) / 3,
    "net.output.bias": np.array([0.1, 0.2, 0.3], dtype="f4"),
}
save_file(state, "model.safetensors", metadata={"format": "pt"})
first = {key: value for key, value in state.items() if "conv" in key}
rest = {key: value for key, value in state.items() if "conv" not in key}
save_file(first, "parts-00001-of-00002.safetensors", metadata={"format": "pt"})
save_file(rest, "parts-00002-of-00002.safetensors", metadata={"format": "pt"})
json.dump({"metadata": {}, "weight_map":
    {key: f"parts-0000{1 if key in first else 2}-of-00002.safetensors" for key in state}},
    open("parts.safetensors.index.json", "w"))
"#;
    if python(program, folder.path()).is_none() {
        return;
    }
    let accelerator = alone();
    let device = accelerator.device();
    let options = LoadOptions::new().strip_prefix("net.");
    let path = folder.path().join("model.safetensors");
    let error = accelerator
        .load_model_with(Net::new(&device), &path, &options)
        .unwrap_err();
    assert_chain(&error, Error::is_model, &["PyTorch's layout"]);

    let options = options.with_layout(FileLayout::PyTorch);
    for name in ["model.safetensors", "parts.safetensors.index.json"] {
        let path = folder.path().join(name);
        let (net, report) = accelerator
            .load_model_with(Net::new(&device), &path, &options)
            .unwrap();
        assert!(report.is_complete(), "{report}");
        let conv: Vec<_> = (0..18_u8).map(|i| f32::from(i) / 7.0).collect();
        assert_eq!(flat(&net.conv), [&conv[..], &[1.0, -1.0]].concat());
        assert_eq!(flat(&net.norm), [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]);
        let weight: Vec<_> = (0..24_u8).map(|i| f32::from(i) / 3.0).collect();
        let turned =
            Tensor::<2>::from_data(TensorData::new(weight, [3, 8]), &device.clone().inner());
        assert_eq!(
            net.output.weight.val().inner().into_data(),
            turned.transpose().into_data()
        );
    }
}
