use core::num::NonZeroUsize;
use std::path::PathBuf;

use accelerator::optim::InitFused;
use accelerator::{Accelerator, AcceleratorBuilder};
use burn::optim::{AdamWConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, FloatDType};
use clap::{Parser, ValueEnum};
use serde::Serialize;
use serde_json::json;

use crate::device::{DeviceName, configure};
use crate::digits::Split;
use crate::error::{Error, Kind, Result};
use crate::tracking::TrackArgs;

/// The most samples to draw; they are kept in memory, 784 bytes each.
const MOST_DRAWN: usize = 1_000_000;

/// Train a small convolutional network to read handwritten digits.
#[derive(Clone, Debug, Parser)]
pub struct MnistArgs {
    /// The folder with MNIST's files, or others in that format; without it, digits are drawn
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,

    /// The number of passes over the training samples; 0 only tests the untrained model
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub epochs: u64,

    /// The number of samples in a batch of each process
    #[arg(long, default_value = "64", value_name = "N", value_parser = at_least_one)]
    pub batch_size: NonZeroUsize,

    /// The learning rate [default: 0.001 for adamw, 0.01 for sgd]
    #[arg(long, value_name = "RATE", value_parser = learning_rate)]
    pub lr: Option<f64>,

    /// The optimizer
    #[arg(long, value_enum, default_value_t = OptimizerName::AdamW)]
    pub optimizer: OptimizerName,

    /// The probability of dropping a value before each dense layer
    #[arg(long, default_value = "0.25", value_name = "P", value_parser = probability)]
    pub dropout: f64,

    /// The seed of weights, dropout and the order of the samples
    #[arg(long, default_value_t = 42)]
    pub seed: u64,

    /// Train on at most this many samples [default: all of a folder, 3200 drawn ones]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub limit: Option<NonZeroUsize>,

    /// The dtype of weights and images
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    pub dtype: Dtype,

    /// The kind of device [default: the fastest that is compiled in]
    #[arg(long, value_enum)]
    pub device: Option<DeviceName>,
}

/// The outputs of a [`Reporter`](crate::Reporter); without a flag, none.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ReportArgs {
    /// Write the metrics of each step, each epoch and the test to this file, one JSON object per line
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,

    /// Write the trained model to this safetensors file
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
}

/// The outputs that compare one training with another; without a flag, none.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ComparisonArgs {
    /// Write the untrained model to this safetensors file
    #[arg(long, value_name = "FILE")]
    pub save_initial: Option<PathBuf>,

    /// Write the positions of the samples of each step to this file, one JSON object per line
    #[arg(long, value_name = "FILE")]
    pub log_samples: Option<PathBuf>,
}

/// The optimizers to choose from.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum OptimizerName {
    /// Adam with decoupled weight decay
    #[value(name = "adamw")]
    AdamW,
    /// Stochastic gradient descent without momentum
    Sgd,
}

/// The dtypes to choose from.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum Dtype {
    /// Single precision
    F32,
    /// Double precision
    F64,
}

impl MnistArgs {
    /// Returns the digits to train on, read from `--data-dir` or drawn.
    ///
    /// # Errors
    ///
    /// The errors of [`Split::open`], and [`Error::is_settings`] if `--limit` asks for more digits than can be drawn.
    pub fn digits(&self) -> Result<Split> {
        let limit = self.limit.map(NonZeroUsize::get);
        if self.data_dir.is_none() && limit.is_some_and(|limit| limit > MOST_DRAWN) {
            return Err(out_of_range(
                &limit.unwrap_or_default().to_string(),
                &format!("a --limit of at most {MOST_DRAWN} drawn digits"),
            ));
        }
        Split::open(self.data_dir.as_deref(), limit)
    }

    /// Returns the builder of an accelerator with these settings.
    pub fn accelerator(&self, tracking: &TrackArgs) -> AcceleratorBuilder {
        Accelerator::builder()
            .device(self.device.map(Into::into))
            .dtype(self.dtype.into())
            .seed(self.seed)
            .log_with(tracking.trackers())
            .data_folders(&self.data_dir)
    }

    /// Returns the learning rate: that of `--lr`, or the default of the optimizer.
    pub fn learning_rate(&self) -> f64 {
        self.lr.unwrap_or(match self.optimizer {
            OptimizerName::AdamW => 1e-3,
            OptimizerName::Sgd => 1e-2,
        })
    }

    /// Returns the settings of the training, to record with its run.
    pub fn hyperparameters(&self) -> impl Serialize + use<> {
        json!({
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "lr": self.learning_rate(),
            "optimizer": format!("{:?}", self.optimizer).to_lowercase(),
            "dropout": self.dropout,
            "seed": self.seed,
            "limit": self.limit,
            "dtype": format!("{:?}", self.dtype).to_lowercase(),
        })
    }

    /// Opens the device of `--device`, or Burn's default one, with the chosen dtype and seed. Call this once, before
    /// the first tensor.
    ///
    /// # Errors
    ///
    /// [`Error::is_device`] if the device is not compiled in or does not support the dtype.
    pub fn open_device(&self) -> Result<Device> {
        let mut device = match self.device {
            Some(name) => name.open()?,
            None => Device::default(),
        };
        configure(&mut device, self.dtype.into())?;
        device.seed(self.seed);
        Ok(device)
    }
}

impl OptimizerName {
    /// Creates the optimizer with Burn's default settings.
    pub fn init(self) -> ModuleOptimizer {
        match self {
            Self::AdamW => AdamWConfig::new().init_fused(),
            Self::Sgd => SgdConfig::new().init_fused(),
        }
    }
}

impl From<Dtype> for FloatDType {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::F64 => Self::F64,
        }
    }
}

fn at_least_one(text: &str) -> Result<NonZeroUsize> {
    text.parse()
        .map_err(|_| out_of_range(text, "a whole number of at least 1"))
}

fn learning_rate(text: &str) -> Result<f64> {
    number(text, "a number above 0, such as 0.001", |rate| {
        rate > 0.0 && rate.is_finite()
    })
}

fn probability(text: &str) -> Result<f64> {
    number(
        text,
        "a number from 0 (nothing is dropped) to less than 1",
        |p| (0.0..1.0).contains(&p),
    )
}

fn number(text: &str, expected: &str, allows: impl Fn(f64) -> bool) -> Result<f64> {
    text.parse()
        .ok()
        .filter(|&number| allows(number))
        .ok_or_else(|| out_of_range(text, expected))
}

fn out_of_range(text: &str, expected: &str) -> Error {
    Error::new(
        Kind::Settings,
        format!("expected {expected}, found `{text}`"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &str) -> Result<MnistArgs, String> {
        let all = ["mnist"].into_iter().chain(args.split_whitespace());
        MnistArgs::try_parse_from(all).map_err(|error| error.to_string())
    }

    #[test]
    fn every_flag_is_known() {
        let args = parse(
            "--data-dir d --epochs 2 --batch-size 32 --lr 0.5 --optimizer sgd --dropout 0 \
             --seed 7 --limit 100 --dtype f64 --device cuda",
        )
        .unwrap();
        assert_eq!((args.epochs, args.batch_size.get(), args.seed), (2, 32, 7));
        assert_eq!((args.learning_rate(), args.dropout), (0.5, 0.0));
        assert_eq!(args.device, Some(DeviceName::Cuda));
        assert_eq!(FloatDType::from(args.dtype), FloatDType::F64);
    }

    #[test]
    fn the_learning_rate_follows_the_optimizer() {
        assert_eq!(parse("").unwrap().learning_rate(), 1e-3);
        assert_eq!(parse("--optimizer sgd").unwrap().learning_rate(), 1e-2);
    }

    #[test]
    fn values_out_of_range_are_named_with_what_is_expected() {
        for (args, found, expected) in [
            ("--batch-size 0", "found `0`", "at least 1"),
            ("--batch-size=-3", "found `-3`", "at least 1"),
            ("--limit 0", "--limit", "at least 1"),
            ("--lr 0", "found `0`", "above 0"),
            ("--lr NaN", "found `NaN`", "above 0"),
            ("--dropout 1", "found `1`", "less than 1"),
            ("--optimizer adam", "'adam'", "adamw, sgd"),
            ("--dtype f16", "'f16'", "f32, f64"),
            (
                "--device banana",
                "'banana'",
                "flex, ndarray, wgpu, cuda, rocm, metal, vulkan, cpu",
            ),
        ] {
            let error = parse(args).unwrap_err();
            assert!(
                error.contains(found) && error.contains(expected),
                "{args}: {error}"
            );
        }
    }

    #[test]
    fn drawn_digits_follow_the_limit() {
        let args = parse("--limit 40").unwrap();
        assert_eq!(args.digits().unwrap().train.count(), 40);
    }
}
