//! Adapters in PEFT's files. `tests/fixtures/peft/peft_adapters.py` made the fixtures.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::common::{assert_chain, assert_error, flat, of_every_rank};
use accelerator::model::{FileLayout, LoadOptions, SaveOptions};
use accelerator::prelude::*;
use burn::module::{Lora, Module, Param, ParamGroup};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

#[derive(Debug, Module)]
struct Block {
    fc1: Linear,
    fc2: Linear,
}

#[derive(Debug, Module)]
struct Net {
    tokens: Embedding,
    blocks: Vec<Block>,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let block = || Block {
            fc1: LinearConfig::new(6, 8).init(device),
            fc2: LinearConfig::new(8, 6).init(device),
        };
        Self {
            tokens: EmbeddingConfig::new(11, 6).init(device),
            blocks: vec![block(), block()],
            head: LinearConfig::new(6, 3).init(device),
        }
    }

    /// Returns the model of the fixtures, without adapters.
    fn base(accelerator: &Accelerator) -> Result<Self> {
        let options = LoadOptions::new().with_layout(FileLayout::PyTorch);
        let model = Self::new(&accelerator.device());
        let path = fixture("base.safetensors");
        Ok(accelerator.load_model_with(model, path, &options)?.0)
    }

    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
        let mut x = self.tokens.forward(tokens);
        for block in &self.blocks {
            x = x.clone() + block.fc2.forward(block.fc1.forward(x).tanh());
        }
        self.head.forward(x.mean_dim(1).squeeze_dim(1))
    }

    fn trained(&self) -> Vec<bool> {
        struct Trained(Vec<bool>);
        impl burn::module::ModuleVisitor for Trained {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                self.0.push(param.is_require_grad());
            }
        }
        let mut trained = Trained(Vec::new());
        self.visit(&mut trained);
        trained.0
    }
}

fn fixture(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/peft");
    folder.join(name)
}

fn read_json(path: impl AsRef<Path>) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Returns the tensors of a file: type, shape and bytes by name.
fn tensors(path: &Path) -> BTreeMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.iter().map(|(name, tensor)| {
        let parts = (
            tensor.dtype(),
            tensor.shape().to_vec(),
            tensor.data().to_vec(),
        );
        (name.to_owned(), parts)
    });
    tensors.collect()
}

fn peft() -> SaveOptions {
    SaveOptions::new().with_layout(FileLayout::Peft)
}

#[test]
fn adapters_of_peft_give_its_outputs_and_are_saved_as_it_saves_them() {
    let outputs = read_json(fixture("outputs.json"));
    let tokens: Vec<i32> = serde_json::from_value::<Vec<Vec<i32>>>(outputs["tokens"].clone())
        .unwrap()
        .concat();
    for (case, logits) in outputs["logits"].as_object().unwrap() {
        let expected: Vec<f32> = serde_json::from_value(logits.clone()).unwrap();
        for ranks in [1, 2, 3] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("adapter_model.safetensors");
            let outcomes = accelerator::launch(ranks, |accelerator| {
                let base = Net::base(&accelerator)?;
                let plain = flat(&base);
                let model = accelerator.load_model(base.clone(), fixture(case))?;
                assert_eq!(model.head.weight.is_require_grad(), case == "patterns");
                assert!(!model.blocks[1].fc1.bias.as_ref().unwrap().is_require_grad());
                let model = accelerator.prepare(model)?;
                let input = TensorData::new(tokens.clone(), [4, tokens.len() / 4]);
                let input = Tensor::from_data(input, &accelerator.device());
                let output = model.forward(input.clone()).into_data();
                let merged = model.valid().materialize().forward(input).into_data();
                merged.assert_approx_eq::<f32>(&output, burn::tensor::Tolerance::absolute(1e-5));

                accelerator.save_model_with(&model, &path, &peft())?;
                let again = accelerator.load_model(base, folder.path())?;
                assert_eq!(flat(&again), flat(&model.valid()));
                assert_ne!(flat(&again), plain);
                assert_eq!(again.trained(), model.trained());
                Ok(output.try_to_vec::<f32>().unwrap())
            });
            let found = of_every_rank(outcomes.unwrap());
            for (found, expected) in found.iter().zip(&expected) {
                assert!(
                    (found - expected).abs() < 1e-5,
                    "{case}: {found} {expected}"
                );
            }
            let given = fixture(case).join("adapter_model.safetensors");
            assert_eq!(tensors(&path), tensors(&given), "{case}, {ranks} ranks");
        }
    }
}

#[test]
fn the_configuration_names_what_differs_between_modules() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapter_model.safetensors");
    let config = folder.path().join("adapter_config.json");
    let accelerator = Accelerator::new().unwrap();
    let base = Net::base(&accelerator).unwrap();
    let model = accelerator.load_model(base, fixture("patterns")).unwrap();
    accelerator.save_model_with(&model, &path, &peft()).unwrap();
    let config = read_json(config);
    for (name, expected) in [
        ("peft_type", json!("LORA")),
        ("r", json!(2)),
        ("lora_alpha", json!(3.0)),
        (
            "rank_pattern",
            json!({"^blocks\\.0\\.fc2": 3, "^blocks\\.1\\.fc2": 3}),
        ),
        ("alpha_pattern", json!({"^blocks\\.1\\.fc2": 7.0})),
        ("modules_to_save", json!(["head"])),
        (
            "target_modules",
            json!([
                "blocks.0.fc1",
                "blocks.0.fc2",
                "blocks.1.fc1",
                "blocks.1.fc2"
            ]),
        ),
    ] {
        assert_eq!(config[name], expected, "{name}");
    }
}

/// A module whose name ends as that of an adapted one is not adapted by PEFT either.
#[test]
fn target_modules_are_a_pattern_if_names_would_match_others() {
    #[derive(Debug, Module)]
    struct Nested {
        fc: Linear,
        inner: Inner,
    }
    #[derive(Debug, Module)]
    struct Inner {
        fc: Linear,
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapter_model.safetensors");
    let accelerator = Accelerator::new().unwrap();
    let device = accelerator.device();
    let linear = || LinearConfig::new(2, 2).init(&device);
    let model = Nested {
        fc: linear(),
        inner: Inner { fc: linear() },
    };
    let lora = Lora::new(1, 16.0 / 12.0).set_param_group(ParamGroup::from_path("fc.weight"));
    let model = model.apply_lora(lora);
    accelerator.save_model_with(&model, &path, &peft()).unwrap();
    let config = read_json(folder.path().join("adapter_config.json"));
    assert_eq!(config["target_modules"], json!("(fc)"));
    assert_eq!(config["lora_alpha"], json!(1.3333334));
}

#[test]
fn training_continues_from_the_adapters_of_a_file() {
    let outcomes = accelerator::launch(2, |accelerator| {
        let base = Net::base(&accelerator)?;
        let frozen = base.head.weight.val().into_data();
        let model = accelerator.load_model(base, fixture("lora"))?;
        let (mut model, mut optimizer) = accelerator.prepare((model, SgdConfig::new().init()))?;
        let before = flat(&model);
        let input = Tensor::<2, Int>::ones([2, 4], &accelerator.device());
        let loss = accelerator.forward(&model, |model| model.forward(input).powi_scalar(2).mean());
        let gradients = accelerator.backward(loss, &model, 2)?;
        model = optimizer.step(0.1, model, gradients);
        assert_eq!(model.head.weight.val().into_data(), frozen);
        assert_ne!(flat(&model), before);
        Ok(flat(&model))
    });
    of_every_rank(outcomes.unwrap());
}

#[test]
fn what_peft_cannot_hold_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapter_model.safetensors");
    let accelerator = Accelerator::new().unwrap();
    let device = accelerator.device();
    let save = |model: &Net| accelerator.save_model_with(model, &path, &peft());
    let refused = |error: &Error, words: &[&str]| assert_error(error, Error::is_model, words);

    let base = Net::base(&accelerator).unwrap();
    refused(
        &save(&base).unwrap_err(),
        &["no LoRA adapters", "apply_lora"],
    );

    let lora = base.clone().apply_lora(Lora::new(2, 4.0));
    let biased = lora
        .clone()
        .unfreeze_group(ParamGroup::from_path("blocks.0.fc1.bias"));
    refused(
        &save(&biased).unwrap_err(),
        &["`blocks.0.fc1.bias`", "freeze"],
    );

    let other = folder.path().join("model.safetensors");
    let error = accelerator
        .save_model_with(&lora, &other, &peft())
        .unwrap_err();
    assert_error(&error, Error::is_config, &["adapter_model.safetensors"]);
    let sharded = peft().with_max_shard_size(8);
    let error = accelerator
        .save_model_with(&lora, &path, &sharded)
        .unwrap_err();
    assert_error(&error, Error::is_config, &["with_max_shard_size"]);

    let matrix =
        Param::from_tensor(Tensor::<2>::ones([1, 2], &device)).apply_lora(Lora::new(1, 1.0));
    let error = accelerator
        .save_model_with(&matrix, &path, &peft())
        .unwrap_err();
    refused(&error, &["`Linear` and `Embedding`", "set_param_group"]);
    assert_eq!(folder.path().read_dir().unwrap().count(), 0);
}

#[test]
fn trained_layers_are_saved_with_averages_and_not_guessed_for_inference() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapter_model.safetensors");
    let accelerator = Accelerator::new().unwrap();
    let base = Net::base(&accelerator).unwrap();
    let model = accelerator.load_model(base, fixture("patterns")).unwrap();
    let model = accelerator.prepare(model).unwrap();
    let ema = Ema::new(&model, 0.5);
    accelerator
        .save_model_with(ema.model(), &path, &peft())
        .unwrap();
    let given = fixture("patterns/adapter_model.safetensors");
    assert_eq!(tensors(&path), tensors(&given));

    let other = Accelerator::new().unwrap();
    let error = other
        .save_model_with(&model.valid(), &path, &peft())
        .unwrap_err();
    assert_error(&error, Error::is_model, &["for inference"]);
}

#[test]
fn a_layer_that_is_trained_whole_must_not_end_the_name_of_another() {
    #[derive(Debug, Module)]
    struct Nested {
        fc: Linear,
        inner_fc: Linear,
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapter_model.safetensors");
    let accelerator = Accelerator::new().unwrap();
    let device = accelerator.device();
    let linear = || LinearConfig::new(2, 2).init(&device);
    let nested = || Nested {
        fc: linear(),
        inner_fc: linear(),
    };
    let adapt = |name: &str| Lora::new(1, 1.0).set_param_group(ParamGroup::from_path(name));
    let model = nested().apply_lora(adapt("inner_fc.weight"));
    let whole = ParamGroup::from_predicate("fc.").exclude(ParamGroup::from_predicate("inner_fc."));
    let error = accelerator
        .save_model_with(&model.unfreeze_group(whole), &path, &peft())
        .unwrap_err();
    assert_error(&error, Error::is_model, &["`fc`", "`inner_fc`", "rename"]);
}

/// Copies PEFT's files of a case with another configuration and other names.
fn changed(
    folder: &Path,
    case: &str,
    config: impl Fn(&mut Value),
    rename: impl Fn(&str) -> String,
) -> PathBuf {
    let to = tempfile::tempdir_in(folder).unwrap().keep();
    let mut value = read_json(fixture(case).join("adapter_config.json"));
    config(&mut value);
    std::fs::write(to.join("adapter_config.json"), value.to_string()).unwrap();
    let tensors = tensors(&fixture(case).join("adapter_model.safetensors"));
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        let view = TensorView::new(*dtype, shape.clone(), bytes).unwrap();
        (rename(name), view)
    });
    let bytes = safetensors::serialize(views, None).unwrap();
    std::fs::write(to.join("adapter_model.safetensors"), bytes).unwrap();
    to
}

#[test]
fn the_first_pattern_that_matches_counts_and_null_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = Accelerator::new().unwrap();
    let scale = |patterns: &str| {
        let path = changed(
            folder.path(),
            "patterns",
            |config| {
                config["alpha_pattern"] = json!("PATTERNS");
                config["rank_pattern"] = Value::Null;
            },
            str::to_owned,
        );
        let file = path.join("adapter_config.json");
        // A `Value` would sort the keys.
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, text.replace("\"PATTERNS\"", patterns)).unwrap();
        let base = Net::base(&accelerator).unwrap();
        let model = accelerator.load_model(base, path).unwrap();
        let scale = |block: &Block| block.fc2.weight.adapter().unwrap().scale * 3.0;
        model.blocks.iter().map(scale).collect::<Vec<_>>()
    };
    assert_eq!(scale(r#"{"fc2": 6, "blocks.1.fc2": 9}"#), [6.0, 6.0]);
    assert_eq!(scale(r#"{"blocks.1.fc2": 9, "fc2": 6}"#), [6.0, 9.0]);
    assert_eq!(scale("null"), [3.0, 3.0]);
}

#[test]
fn other_names_of_the_same_layers_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = Accelerator::new().unwrap();
    let load = |path: &Path, options: LoadOptions| {
        let base = Net::base(&accelerator).unwrap();
        flat(&accelerator.load_model_with(base, path, &options).unwrap().0)
    };
    let expected = load(&fixture("patterns"), LoadOptions::new());
    // As PEFT names what is beside an adapter, and as a program may have renamed it.
    let base_layer = |name: &str| name.replace("head.", "head.base_layer.");
    let path = changed(folder.path(), "patterns", |_| (), base_layer);
    assert_eq!(load(&path, LoadOptions::new()), expected);
    let stripped = LoadOptions::new()
        .with_layout(FileLayout::Peft)
        .strip_prefix("base_model.model.");
    assert_eq!(load(&fixture("patterns"), stripped), expected);
}

#[test]
fn files_that_do_not_fit_are_refused_on_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    let copy = |change: &dyn Fn(&mut Value)| changed(folder.path(), "lora", change, str::to_owned);
    let dora = copy(&|config| config["use_dora"] = json!(true));
    let loha = copy(&|config| config["peft_type"] = json!("LOHA"));
    let pissa = copy(&|config| config["init_lora_weights"] = json!("pissa_niter_4"));
    let biases = copy(&|config| config["bias"] = json!("all"));
    let pattern = copy(&|config| config["alpha_pattern"] = json!({"(": 1}));
    let alone = copy(&|_| ());
    std::fs::remove_file(alone.join("adapter_config.json")).unwrap();
    for (path, words) in [
        (dora, &["`use_dora` is true"][..]),
        (loha, &["LOHA"]),
        (pissa, &["init_lora_weights", "pissa"]),
        (biases, &["`bias`", "all"]),
        (pattern, &["alpha_pattern"]),
        (alone, &["configuration of adapters", "adapter_config.json"]),
    ] {
        let errors = accelerator::launch(2, |accelerator| {
            let base = Net::base(&accelerator)?;
            Ok(accelerator.load_model(base, &path).map(drop).unwrap_err())
        });
        for error in errors.unwrap() {
            let is_kind = |error: &Error| error.is_model() || error.is_io();
            assert_chain(&error, is_kind, words);
        }
    }
    let errors = accelerator::launch(2, |accelerator| {
        let model = Net::base(&accelerator)?.apply_lora(Lora::new(2, 6.0));
        Ok(accelerator
            .load_model(model, fixture("lora"))
            .map(drop)
            .unwrap_err())
    });
    for error in errors.unwrap() {
        assert_error(&error, Error::is_model, &["scale 3", "has 2", "lora_alpha"]);
    }
}
