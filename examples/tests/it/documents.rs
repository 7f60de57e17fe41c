//! The code of the README and of `docs/`, compiled: each block is in a function here, in another file of this folder or
//! in an example, or is a doctest of the library.

#![allow(
    clippy::single_range_in_vec_init,
    clippy::unwrap_used,
    dead_code,
    unused_variables,
    unused_assignments,
    unused_mut,
    reason = "the functions are blocks of documents, and only compiled"
)]

use std::fs;
use std::path::{Path, PathBuf};

use accelerator::optim::Scheduled;
use accelerator::prelude::*;
use accelerator::train::{OperatorTrainer, Registered, RegisteredModel, Setup, TrainingOperator};
use accelerator_examples::{Cnn, CnnConfig, DigitBatch, DigitBatcher, Digits, cross_entropy};
use burn::lr_scheduler::constant::ConstantLr;
use burn::nn::Linear;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, SgdConfig};
use burn::tensor::{Device, Int, Tensor};
use serde::{Deserialize, Serialize};

use crate::listing;

type Manual = PreparedOptimizer<accelerator::optim::Manual>;
type Model = Linear;

/// Documents whose code is a doctest of the library.
const DOCTESTS: [&str; 3] = ["adapters.md", "tracking.md", "trainer.md"];

/// A batch of a program whose samples have an input and a target.
struct Pairs {
    x: Tensor<2>,
    y: Tensor<2>,
    inputs: Tensor<2>,
    targets: Tensor<1, Int>,
}

fn readme(
    accelerator: &Accelerator,
    (model, optimizer, train): (Model, Manual, PreparedLoader<Pairs>),
) -> Result<()> {
    let ((mut model, mut optimizer, train), position) =
        accelerator.resume("checkpoints/a", (model, optimizer, train))?;
    for epoch in position.epoch()..3 { /* … */ }
    accelerator.save_state("checkpoints/a", (&model, &optimizer, &train))?;
    Ok(())
}

mod elastic {
    use super::*;

    fn main() -> Result<()> {
        let mut accelerator = Accelerator::new()?;
        while let Some(next) = train(&accelerator)? {
            accelerator = next;
        }
        Ok(())
    }

    fn train(accelerator: &Accelerator) -> Result<Option<Accelerator>> {
        let (model, optimizer, train): (Model, Manual, PreparedLoader<Pairs>) = parts();
        let (parts, position) = accelerator.resume("checkpoints/a", (model, optimizer, train))?;
        let (mut model, mut optimizer, train) = parts;
        for epoch in position.epoch()..3 {
            for batch in train.epoch(epoch) {
                drop(batch?);
                if accelerator.regroup_pending()? {
                    return accelerator.regroup((&model, &optimizer, &train));
                }
            }
        }
        accelerator.finish()?;
        Ok(None)
    }

    fn train_with_losses(accelerator: &Accelerator) -> Result<Option<Accelerator>> {
        let (mut model, mut optimizer, train): (Model, Manual, PreparedLoader<Pairs>) = parts();
        for batch in train.epoch(0) {
            let batch = batch?;
            let loss = model.forward(batch.x.clone()).mean();
            match accelerator.backward(loss, &model, &batch) {
                Ok(gradients) => model = optimizer.step(1e-2, model, gradients),
                Err(lost) if lost.is_peer_lost() => {
                    return accelerator.recover((&model, &optimizer, &train)).map(Some);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    fn parts<T>() -> T {
        unreachable!("only compiled")
    }
}

fn from_accelerate(
    accelerator: &Accelerator,
    (mut model, mut optimizer): (Model, PreparedOptimizer<Scheduled>),
    loader: PreparedLoader<Pairs>,
    (criterion, epoch): (fn(Tensor<2>, Tensor<2>) -> Tensor<1>, u64),
) -> Result<()> {
    for batch in loader.epoch(epoch) {
        let batch = batch?;
        let loss = criterion(model.forward(batch.x.clone()), batch.y.clone());
        let gradients = accelerator.backward(loss, &model, &batch)?.clip_norm(1.0);
        model = optimizer.step(model, gradients);
    }
    Ok(())
}

fn tensors(x: Tensor<2>) {
    let means = x.clone().mean_dim(1).squeeze_dim::<1>(1);
    let classes = x.clone().argmax(1).squeeze_dim::<1>(1);
    let column = means.unsqueeze_dim::<2>(1);
    let flat: Tensor<1> = x.clone().reshape([-1]);
    let rows = x.clone().slice([0..2]);
    let total: f64 = x.sum().into_scalar();
}

fn from_burn_train(
    accelerator: &Accelerator,
    (model, valid): (Model, PreparedLoader<Pairs>),
    hits: fn(Tensor<2>, Tensor<1, Int>) -> usize,
) -> Result<()> {
    use accelerator::metric::Sum;

    let (mut correct, mut samples) = (Sum::new(), Sum::new());
    for batch in valid.eval() {
        let batch = batch?;
        let output = model.forward(batch.inputs.clone());
        let real = batch.real();
        if real > 0 {
            let output = output.slice([0..real]);
            let targets = batch.targets.clone().slice([0..real]);
            correct.count(hits(output, targets));
        }
        samples.count(real);
    }
    let (correct, samples) = accelerator.reduce_metric((correct, samples))?;
    Ok(())
}

#[derive(Deserialize, Serialize)]
struct Config {
    lr: f64,
    momentum: f64,
}

struct MnistOperator;

impl TrainingOperator for MnistOperator {
    type Config = Config;
    type Models = RegisteredModel<Cnn, DigitBatch>;

    fn setup(setup: &Setup<Self>, config: &Config) -> Result<Registered<Self>> {
        let (train_loader, test_loader) = loaders(config);
        let momentum = MomentumConfig::new().with_momentum(config.momentum);
        let optimizer = SgdConfig::new().with_momentum(Some(momentum)).init();
        let cnn = |device: &Device| CnnConfig::new().init(device);
        let model = setup
            .register(cnn, (optimizer, ConstantLr::new(config.lr)))?
            .with_criterion(|model, batch| {
                let logits = batch.to_full(model.forward(batch.to_working(batch.images.clone())));
                (
                    cross_entropy(logits.clone(), batch.targets.clone()),
                    (logits, batch.targets.clone()),
                )
            });
        let data = setup.register_data(train_loader, test_loader)?;
        Ok(Registered::new(MnistOperator, model, data))
    }
}

type Loader = accelerator::data::Loader<DigitBatch>;

fn loaders(config: &Config) -> (Loader, Loader) {
    let loader = || {
        let loader = LoaderBuilder::new(DigitBatcher).batch_size(16);
        loader.build(Digits::draw(16, 1))
    };
    (loader(), loader())
}

fn from_ray(num_epochs: u64, config: Config) -> Result<()> {
    let builder = Accelerator::builder().precision(Precision::F16);
    let mut trainer = OperatorTrainer::<MnistOperator>::with_accelerator(builder, 8, config)?;
    for _ in 0..num_epochs {
        let metrics = trainer.train(None)?;
        let val_metrics = trainer.validate()?;
    }
    trainer.shutdown()?;
    Ok(())
}

fn accumulation() -> Result<()> {
    let accelerator = Accelerator::builder().accumulation_steps(4).build()?;
    let accelerator = Accelerator::builder().global_batch(256, 32).build()?;
    Ok(())
}

fn batch_size(
    accelerator: &Accelerator,
    model: Model,
    loss_of_a_batch: fn(&Model, usize) -> Tensor<1>,
) -> Result<()> {
    let (size, ()) = accelerator.find_executable_batch_size(128, &model, |size| {
        let loss = loss_of_a_batch(&model, size);
        drop(loss.backward());
        Ok::<_, Error>(())
    })?;
    Ok(())
}

fn sharded_state(accelerator: &Accelerator, model: Model) -> Result<()> {
    let (model, optimizer) =
        accelerator.prepare((model, Sharded(AdamWConfig::new().init_fused())))?;
    Ok(())
}

fn preemption(
    accelerator: &Accelerator,
    (mut model, mut optimizer, train): (Model, Manual, PreparedLoader<Pairs>),
    gradients: AveragedGradients,
) -> Result<std::process::ExitCode> {
    accelerator.on_preemption(Preemption::new())?;

    model = optimizer.step(1e-3, model, gradients);
    if accelerator.preempted()? {
        accelerator.save_state("checkpoints/a", (&model, &optimizer, &train))?;
        return accelerator.finish_preempted();
    }
    Ok(std::process::ExitCode::SUCCESS)
}

mod search {
    use accelerator_tune::{Asha, Mode, Objective, Search, Space, Stop, loguniform, uniform};

    fn main() -> Result<(), Box<dyn std::error::Error>> {
        let space = Space::new([
            ("lr", loguniform(1e-4, 1e-1)),
            ("momentum", uniform(0.1, 0.9)),
        ]);
        let results = Search::new("line", Objective::new("loss", Mode::Min))
            .space(space)
            .num_samples(16)
            .scheduler(Asha::default())
            .stop(Stop::new().iterations(50))
            .run_fn(|trial, config| {
                let (lr, momentum): (f64, f64) = (config.parse("lr")?, config.parse("momentum")?);
                let (mut x, mut speed) = (5.0, 0.0);
                loop {
                    speed = momentum * speed - lr * 2.0 * x;
                    x += speed;
                    trial.report([("loss", x * x)])?;
                }
            })?;
        println!(
            "Best config is: {:?}",
            results.best_config("loss", Mode::Min)
        );
        Ok(())
    }
}

fn trial(
    (folder, from): (PathBuf, String),
    (accelerator, lr): (&Accelerator, f64),
    (model, optimizer, train): (Model, Manual, PreparedLoader<Pairs>),
    validation_loss: fn(&Model) -> Result<f64>,
) -> Result<()> {
    let from = match from.is_empty() {
        true => folder.join("none"),
        false => PathBuf::from(from),
    };
    let ((mut model, mut optimizer, train), position) =
        accelerator.resume(&from, (model, optimizer, train))?;
    for epoch in position.epoch()..16 {
        let loss = validation_loss(&model)?;
        let checkpoint = folder.join(format!("epoch-{epoch}"));
        accelerator.save_state(&checkpoint, (&model, &optimizer, &train))?;
        print_main!(
            accelerator,
            r#"{{"loss": {loss}, "checkpoint": {checkpoint:?}}}"#
        );
    }
    Ok(())
}

#[test]
fn code_of_documents_is_compiled() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let folders = ["examples", "examples/tests/it"].map(|folder| root.join(folder));
    let entries = folders
        .iter()
        .flat_map(|folder| fs::read_dir(folder).unwrap());
    let files = entries.map(|entry| entry.unwrap().path());
    let sources: Vec<String> = files
        .filter(|path| path.extension().is_some_and(|it| it == "rs"))
        .map(|path| bare(&fs::read_to_string(path).unwrap()))
        .collect();
    let library = fs::read_to_string(root.join("accelerator/src/lib.rs")).unwrap();
    let mut found = 0;
    let mut missing = Vec::new();
    for document in listing::documents(root) {
        let name = document.file_name().unwrap().to_str().unwrap().to_owned();
        let text = fs::read_to_string(&document).unwrap();
        if DOCTESTS.contains(&name.as_str()) {
            let include = format!("#[doc = include_str!(\"../../docs/{name}\")]");
            assert!(library.contains(&include), "{include}");
            continue;
        }
        let (blocks, plain) = (text.matches("```rust"), text.matches("```rust\n"));
        assert_eq!(blocks.count(), plain.count(), "{name} has attributes");
        for block in text.split("```rust\n").skip(1) {
            let block = block.split("```").next().unwrap();
            found += 1;
            if !sources.iter().any(|source| has_in_order(source, block)) {
                missing.push(format!("{name}: it is not compiled:\n{block}"));
            }
        }
    }
    assert!(found >= 30, "only {found} blocks were found");
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

/// Returns `true` if `source` has the parts of a block in their order: something is left out at each `// …`.
fn has_in_order(source: &str, block: &str) -> bool {
    let mut rest = source;
    let lines: Vec<&str> = block.lines().collect();
    lines
        .split(|line| line.trim_start().starts_with("// …"))
        .map(|part| bare(&part.join("\n")))
        .all(|part| match rest.split_once(&part) {
            Some((_, after)) => {
                rest = after;
                true
            }
            None => false,
        })
}

/// Drops comments, blanks, and the commas that the formatter adds.
fn bare(code: &str) -> String {
    let lines = code
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default());
    let code: String = lines
        .flat_map(str::chars)
        .filter(|it| !it.is_whitespace())
        .collect();
    code.replace(",)", ")")
        .replace(",]", "]")
        .replace(",}", "}")
}
