//! The training operator on ranks that are threads, compared with a loop by hand and with the trainer.

use accelerator::data::Loader;
use accelerator::prelude::*;
use accelerator::train::{
    Inputs, LossOutput, LrSchedulerType, Metrics, OperatorTrainer, OperatorWorker, OptimizerName,
    Registered, RegisteredModel, RegisteredModels, SaveStrategy, Setup, StepInfo, Trainer,
    TrainingArguments, TrainingOperator,
};
use burn::data::dataloader::batcher::Batcher;
use burn::lr_scheduler::constant::ConstantLr;
use burn::module::Module;
use burn::nn::Linear;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::SgdConfig;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Int, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use crate::common::{assert_error, columns, linear};

const SAMPLES: usize = 22;
const RATE: f64 = 0.2;
const CLIP: f64 = 0.05;

#[derive(Debug, Module)]
struct Net {
    hidden: Linear,
    output: Linear,
}

fn net(device: &Device) -> Net {
    Net {
        hidden: linear(4, 8, device),
        output: linear(8, 3, device),
    }
}

#[derive(Clone, Debug)]
struct Labelled {
    inputs: Tensor<2>,
    labels: Tensor<1, Int>,
}

#[derive(Clone)]
struct LabelledBatcher;

impl Batcher<usize, Labelled> for LabelledBatcher {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Labelled {
        let values = items.iter().flat_map(|&item| {
            (0..4).map(move |column| ((item * 7 + column * 3) as f32 * 0.9).sin())
        });
        let values = TensorData::new(values.collect::<Vec<_>>(), [items.len(), 4]);
        let labels: Vec<i64> = items.iter().map(|&item| (item % 3) as i64).collect();
        Labelled {
            inputs: Tensor::from_data(values, device),
            labels: Tensor::from_data(TensorData::from(labels.as_slice()), device),
        }
    }
}

fn loader(samples: usize) -> Loader<Labelled> {
    LoaderBuilder::new(LabelledBatcher)
        .batch_size(4)
        .shuffle(7)
        .build(columns(samples))
}

fn forward(net: &Net, inputs: Tensor<2>) -> Tensor<2> {
    net.output.forward(relu(net.hidden.forward(inputs)))
}

fn criterion(net: &Net, batch: &Labelled) -> (Tensor<1>, (Tensor<2>, Tensor<1, Int>)) {
    let logits = forward(net, batch.inputs.clone());
    let loss = CrossEntropyLossConfig::new().init(&logits.device());
    let loss = loss.forward(logits.clone(), batch.labels.clone());
    (loss, (logits, batch.labels.clone()))
}

fn register<T>(setup: &Setup<T>, rate: f64) -> Result<RegisteredModel<Net, Labelled>>
where
    T: TrainingOperator,
    T::Models: RegisteredModels<Batch = Labelled>,
{
    let optimizer = (SgdConfig::new().init_fused(), ConstantLr::new(rate));
    let model = setup.register(net, optimizer)?;
    Ok(model.with_criterion(|net, batch| criterion(net, batch)))
}

fn bits(net: &Net) -> Vec<u32> {
    let tensors = [
        net.hidden.weight.val().into_data(),
        net.output.weight.val().into_data(),
        net.output.bias.as_ref().unwrap().val().into_data(),
    ];
    let values = tensors.iter().flat_map(|data| data.iter::<f32>());
    values.map(f32::to_bits).collect()
}

#[derive(Clone, Deserialize, Serialize)]
struct Config {
    rate: f64,
    clip: Option<f64>,
}

/// An operator that counts the batches that it has seen, across saves too.
struct Classifier {
    seen: u64,
}

impl TrainingOperator for Classifier {
    type Config = Config;
    type Models = RegisteredModel<Net, Labelled>;

    fn setup(setup: &Setup<Self>, config: &Config) -> Result<Registered<Self>> {
        let model = register(setup, config.rate)?;
        let data = setup.register_data(loader(SAMPLES), loader(SAMPLES))?;
        Ok(Registered::new(Self { seen: 0 }, model, data))
    }

    fn train_batch(
        &mut self,
        worker: &mut OperatorWorker<Self>,
        batch: &Batch<Labelled>,
        info: &StepInfo,
    ) -> Result<Metrics> {
        assert_eq!(info.global_step, self.seen);
        self.seen += 1;
        let OperatorWorker {
            accelerator,
            config,
            models,
            ..
        } = worker;
        let loss = models.loss(accelerator, batch)?;
        let train_loss = loss.clone().into_scalar::<f64>();
        let gradients = accelerator.backward(loss, models.model(), batch)?;
        models.step(match config.clip {
            Some(clip) => gradients.clip_norm(clip),
            None => gradients,
        });
        Ok(Metrics::from_iter([("train_loss", train_loss)]))
    }

    fn state_dict(&self) -> Result<serde_json::Value> {
        Ok(self.seen.into())
    }

    fn load_state_dict(&mut self, state: serde_json::Value) -> Result<()> {
        self.seen = state.as_u64().ok_or_else(|| Error::other("no count"))?;
        Ok(())
    }
}

/// An operator with all defaults.
struct Plain;

impl TrainingOperator for Plain {
    type Config = f64;
    type Models = RegisteredModel<Net, Labelled>;

    fn setup(setup: &Setup<Self>, rate: &f64) -> Result<Registered<Self>> {
        let model = register(setup, *rate)?;
        let data = setup.register_data(loader(SAMPLES), loader(7))?;
        Ok(Registered::new(Self, model, data))
    }
}

const CLIPPED: Config = Config {
    rate: RATE,
    clip: Some(CLIP),
};

fn on_ranks<R: Send>(
    world_size: usize,
    body: impl Fn(Accelerator) -> Result<R> + Send + Sync,
) -> Vec<R> {
    let builder = Accelerator::builder()
        .device(BackendKind::Flex)
        .accumulation_steps(2);
    builder.launch(world_size, body).unwrap()
}

fn net_of<T>(trainer: &OperatorTrainer<T>) -> Vec<u32>
where
    T: TrainingOperator<Models = RegisteredModel<Net, Labelled>>,
{
    bits(trainer.worker().unwrap().models.model())
}

/// The bits of the weights, and the loss of each update.
type Trained = (Vec<u32>, Vec<f64>);

fn by_hand(accelerator: &Accelerator, epochs: u64, clip: Option<f64>) -> Result<Trained> {
    let model = net(&accelerator.device());
    let optimizer = (SgdConfig::new().init_fused(), ConstantLr::new(RATE));
    let (mut model, mut optimizer, train) =
        accelerator.prepare((model, optimizer, loader(SAMPLES)))?;
    let mut losses = Vec::new();
    for epoch in 0..epochs {
        for batch in train.epoch(epoch) {
            let batch = batch?;
            let loss = criterion(&model, &batch).0;
            let gradients = accelerator.backward(loss, &model, &batch)?;
            losses.extend(gradients.loss());
            let gradients = match clip {
                Some(clip) => gradients.clip_norm(clip),
                None => gradients,
            };
            model = optimizer.step(model, gradients);
        }
    }
    Ok((bits(&model), losses))
}

fn by_trainer(accelerator: &Accelerator) -> Result<Trained> {
    let arguments = TrainingArguments {
        data_seed: Some(7),
        disable_tqdm: true,
        gradient_accumulation_steps: 2,
        learning_rate: RATE,
        logging_steps: 1.0,
        lr_scheduler_type: LrSchedulerType::Constant,
        max_grad_norm: CLIP,
        num_train_epochs: 2.0,
        optim: OptimizerName::Sgd,
        per_device_train_batch_size: 4,
        save_strategy: SaveStrategy::No,
        ..TrainingArguments::default()
    };
    let loss = |net: &Net, inputs: &Inputs<'_, Labelled>| criterion(net, inputs).0;
    let mut trainer = Trainer::builder(arguments, net, LabelledBatcher, loss)
        .accelerator(accelerator.clone())
        .train_dataset(columns(SAMPLES))
        .build()?;
    trainer.train()?;
    let history = trainer.state().log_history.iter();
    let losses = history.filter_map(|entry| entry.metrics.value("loss"));
    Ok((bits(trainer.model()), losses.collect()))
}

#[test]
fn its_weights_are_those_of_a_loop_by_hand_and_of_the_trainer() {
    // Two ranks end an epoch with a window of one micro-step, and three share its last batch unevenly.
    for (world_size, updates) in [(1, 6), (2, 4), (3, 2)] {
        let operator = on_ranks(world_size, |accelerator| {
            let mut trainer = OperatorTrainer::<Classifier>::on(accelerator, CLIPPED)?;
            trainer.train(None)?;
            trainer.validate()?;
            trainer.train(None)?;
            let bits = net_of(&trainer);
            trainer.shutdown()?;
            Ok(bits)
        });
        let hand = on_ranks(world_size, |accelerator| {
            by_hand(&accelerator, 2, Some(CLIP))
        });
        let trainer = on_ranks(world_size, |accelerator| by_trainer(&accelerator));
        assert_eq!(hand[0].1.len(), updates);
        assert_eq!(trainer, hand);
        let unclipped = on_ranks(world_size, |accelerator| by_hand(&accelerator, 2, None));
        for (rank, operator) in operator.iter().enumerate() {
            assert_eq!(*operator, hand[rank].0);
            assert_ne!(*operator, unclipped[rank].0);
        }
    }
}

#[test]
fn the_defaults_train_as_a_loop_by_hand() {
    for world_size in [1, 2] {
        let operator = on_ranks(world_size, |accelerator| {
            let mut trainer = OperatorTrainer::<Plain>::on(accelerator, RATE)?;
            trainer.train(None)?;
            Ok(net_of(&trainer))
        });
        let hand = on_ranks(world_size, |accelerator| {
            Ok(by_hand(&accelerator, 1, None)?.0)
        });
        assert_eq!(operator, hand);
    }
}

#[test]
fn metrics_are_means_over_the_samples_of_all_ranks() {
    let metrics = |world_size| {
        on_ranks(world_size, |accelerator| {
            // The rate is 0, so one loss is the mean of the others.
            let mut trainer = OperatorTrainer::<Plain>::on(accelerator, 0.0)?;
            Ok((trainer.train(None)?, trainer.validate()?))
        })
    };
    let alone = metrics(1).remove(0);
    let expected = |found: &Metrics, name: &str| {
        let value = found.value(name).unwrap();
        assert!(value.is_finite(), "{name}: {value}");
        value
    };
    for (world_size, batches, val_batches) in [(1, 6.0, 2.0), (2, 3.0, 1.0), (3, 2.0, 1.0)] {
        for (train, val) in metrics(world_size) {
            let names: Vec<_> = train.iter().map(|(name, _)| name).collect();
            assert_eq!(
                names,
                [
                    "batch_count",
                    "num_samples",
                    "train_loss",
                    "last_train_loss",
                    "epoch"
                ]
            );
            assert_eq!(train.value("batch_count"), Some(batches));
            assert_eq!(train.value("num_samples"), Some(22.0));
            assert_eq!(train.value("epoch"), Some(1.0));
            assert_eq!(val.value("batch_count"), Some(val_batches));
            assert_eq!(val.value("num_samples"), Some(7.0));
            assert_eq!(val.value("val_accuracy"), alone.1.value("val_accuracy"));
            for (found, reference, name) in [
                (&train, &alone.0, "train_loss"),
                (&val, &alone.1, "val_loss"),
            ] {
                let difference = expected(found, name) - expected(reference, name);
                assert!(
                    difference.abs() < 1e-6,
                    "{name} on {world_size}: {difference}"
                );
            }
            expected(&train, "last_train_loss");
            expected(&val, "last_val_accuracy");
        }
    }
}

/// An operator whose loss is a mean over tokens. A sample of class c has c + 1 tokens with a loss of c each, and the
/// prediction is always class 0.
struct OfTokens;

impl TrainingOperator for OfTokens {
    type Config = ();
    type Models = RegisteredModel<Net, Labelled>;

    fn setup(setup: &Setup<Self>, (): &()) -> Result<Registered<Self>> {
        let optimizer = (SgdConfig::new().init_fused(), ConstantLr::new(0.0));
        let model = setup
            .register(net, optimizer)?
            .with_criterion(|net, batch| {
                let nothing = forward(net, batch.inputs.clone()) * 0.0;
                let classes = batch.labels.clone().float();
                let tokens = classes.clone() + 1.0;
                let items = tokens.clone().sum();
                let loss = (classes * tokens).sum() / items.clone();
                let logits = nothing.clone()
                    + Tensor::<2>::from_floats([[1.0, 0.0, 0.0]], &nothing.device());
                LossOutput::new(loss + nothing.sum())
                    .with_num_items(items.into_scalar::<f64>() as usize)
                    .with_outputs((logits, batch.labels.clone()))
            });
        let data = setup.register_data(loader(SAMPLES), loader(7))?;
        Ok(Registered::new(Self, model, data))
    }
}

#[test]
fn a_loss_over_tokens_leaves_the_accuracy_to_samples() {
    for world_size in [1, 2, 3] {
        let metrics = on_ranks(world_size, |accelerator| {
            let mut trainer = OperatorTrainer::<OfTokens>::on(accelerator, ())?;
            Ok((trainer.train(None)?, trainer.validate()?))
        });
        for (train, val) in metrics {
            // Seven of 22 samples for training, and two of 7 for validation, have class 1 or 2.
            for (found, name, expected) in [
                (
                    &train,
                    "train_loss",
                    (7 * 2 + 7 * 6) as f64 / (8 + 7 * 2 + 7 * 3) as f64,
                ),
                (
                    &val,
                    "val_loss",
                    (2 * 2 + 2 * 6) as f64 / (3 + 2 * 2 + 2 * 3) as f64,
                ),
                (&val, "val_accuracy", 3.0 / 7.0),
                (&train, "num_samples", 22.0),
                (&val, "num_samples", 7.0),
            ] {
                let difference = found.value(name).unwrap() - expected;
                assert!(
                    difference.abs() < 1e-6,
                    "{name} on {world_size}: {difference}"
                );
            }
        }
    }
}

#[test]
fn steps_go_on_over_calls_and_into_the_next_epoch() {
    let accelerator = Accelerator::new().unwrap();
    let mut trainer = OperatorTrainer::<Plain>::on(accelerator, RATE).unwrap();
    let calls = [
        (Some(4), (4.0, 16.0, 1.0)),
        // Two batches of the first epoch, of 4 and 2 samples, and two of the next.
        (Some(4), (4.0, 14.0, 2.0)),
        // The rest of the second epoch.
        (None, (4.0, 14.0, 2.0)),
        (Some(6), (6.0, 22.0, 3.0)),
        (None, (6.0, 22.0, 4.0)),
        (Some(13), (13.0, 48.0, 7.0)),
    ];
    for (num_steps, expected) in calls {
        let metrics = trainer.train(num_steps).unwrap();
        let found = ["batch_count", "num_samples", "epoch"].map(|name| metrics.value(name));
        let (batches, samples, epoch) = expected;
        assert_eq!(
            found,
            [Some(batches), Some(samples), Some(epoch)],
            "{num_steps:?}"
        );
    }
    assert!(trainer.train(0).unwrap_err().is_config());
}

#[test]
fn a_training_continues_from_what_was_saved() {
    let folder = tempfile::tempdir().unwrap();
    for world_size in [1, 2] {
        let path = folder.path().join(world_size.to_string());
        let whole = on_ranks(world_size, |accelerator| {
            let mut trainer = OperatorTrainer::<Classifier>::on(accelerator, CLIPPED)?;
            trainer.train(2)?;
            trainer.save(&path)?;
            let rest = trainer.train(None)?;
            trainer.train(1)?;
            assert!(
                trainer.save(&path).unwrap_err().is_misuse(),
                "within a window"
            );
            let last = trainer.train(None)?;
            Ok((rest, last, net_of(&trainer)))
        });
        let resumed = on_ranks(world_size, |accelerator| {
            let mut trainer = OperatorTrainer::<Classifier>::on(accelerator, CLIPPED)?;
            // `load` leaves this position.
            trainer.train(1)?;
            trainer.load(&path)?;
            let rest = trainer.train(None)?;
            trainer.train(1)?;
            let last = trainer.train(None)?;
            Ok((rest, last, net_of(&trainer)))
        });
        assert_eq!(whole, resumed);
    }
    // Eight samples are used already.
    let counts = on_ranks(2, |accelerator| {
        let mut trainer = OperatorTrainer::<Classifier>::on(accelerator, CLIPPED)?;
        trainer.load(folder.path().join("1"))?;
        Ok(trainer.train(None)?.value("num_samples"))
    });
    assert_eq!(counts, [Some(14.0); 2]);
}

#[test]
fn an_operator_is_gone_where_there_is_nothing_to_load() {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = Accelerator::new().unwrap();
    let mut trainer = OperatorTrainer::<Plain>::on(accelerator, RATE).unwrap();
    let error = trainer.load(folder.path()).unwrap_err();
    assert_error(&error, Error::is_config, &["no checkpoint"]);
    assert!(trainer.train(None).unwrap_err().is_misuse());
}

type Two = (
    RegisteredModel<Net, Labelled>,
    RegisteredModel<Net, Labelled>,
);

fn register_two<T: TrainingOperator<Models = Two>>(
    setup: &Setup<T>,
    operator: T,
) -> Result<Registered<T>> {
    let models = (register(setup, RATE)?, register(setup, RATE / 2.0)?);
    let data = setup.register_data(loader(SAMPLES), None)?;
    Ok(Registered::new(operator, models, data))
}

/// An operator with two models, each trained on its own.
struct Pair;

impl TrainingOperator for Pair {
    type Config = ();
    type Models = Two;

    fn setup(setup: &Setup<Self>, (): &()) -> Result<Registered<Self>> {
        register_two(setup, Self)
    }

    fn train_batch(
        &mut self,
        worker: &mut OperatorWorker<Self>,
        batch: &Batch<Labelled>,
        _: &StepInfo,
    ) -> Result<Metrics> {
        let OperatorWorker {
            accelerator,
            models: (first, second),
            ..
        } = worker;
        let mut losses = Vec::new();
        for (name, models) in [("first_loss", first), ("second_loss", second)] {
            let loss = models.loss(accelerator, batch)?;
            losses.push((name, loss.clone().into_scalar::<f64>()));
            let gradients = accelerator.backward(loss, models.model(), batch)?;
            models.step(gradients);
        }
        Ok(Metrics::from_iter(losses))
    }
}

/// An operator with two models that does not say how to train them.
struct Undecided;

impl TrainingOperator for Undecided {
    type Config = ();
    type Models = Two;

    fn setup(setup: &Setup<Self>, (): &()) -> Result<Registered<Self>> {
        register_two(setup, Self)
    }
}

#[test]
fn several_models_are_trained_by_the_programs_own_method() {
    let folder = tempfile::tempdir().unwrap();
    let outcomes = on_ranks(2, |accelerator| {
        let mut trainer = OperatorTrainer::<Pair>::on(accelerator, ())?;
        let metrics = trainer.train(None)?;
        assert!(
            metrics.value("first_loss").is_some() && metrics.value("last_second_loss").is_some()
        );
        assert!(
            trainer.validate().unwrap_err().is_config(),
            "there is no data"
        );
        trainer.save(folder.path())?;
        trainer.train(None)?;
        let models = |trainer: &OperatorTrainer<Pair>| {
            let (first, second) = &trainer.worker().unwrap().models;
            (bits(first.model()), bits(second.model()))
        };
        let ended = models(&trainer);
        trainer.load(folder.path())?;
        assert_ne!(models(&trainer), ended);
        trainer.train(None)?;
        Ok((ended, models(&trainer)))
    });
    for (ended, again) in outcomes {
        assert_eq!(ended, again);
        assert_ne!(ended.0, ended.1, "they have other rates");
    }
}

#[test]
fn several_models_have_no_default() {
    let accelerator = Accelerator::new().unwrap();
    let mut trainer = OperatorTrainer::<Undecided>::on(accelerator, ()).unwrap();
    let error = trainer.train(None).unwrap_err();
    let words = ["several models are registered", "`train_epoch`"];
    assert_error(&error, Error::is_misuse, &words);
}
