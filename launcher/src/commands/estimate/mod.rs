//! `accel-launch estimate-memory`: the memory that training a model takes, from its file alone.

mod header;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde::Serialize;

use self::header::Tensor;
use crate::error::Result;
use crate::text::{columns, json, print, size};

/// Arguments of `accel-launch estimate-memory`.
#[derive(Args, Clone, Debug)]
pub(crate) struct EstimateArgs {
    /// A safetensors file, or the index of one in shards (`….safetensors.index.json`).
    ///
    /// Only headers are read, whatever the size.
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Print JSON, in bytes.
    #[arg(long)]
    json: bool,
}

/// Reads the headers and prints what they come to.
///
/// # Errors
/// When the file is not there or no safetensors file, or standard output cannot be written.
pub(crate) fn run(arguments: &EstimateArgs) -> Result<ExitCode> {
    let report = MemoryEstimate::of(&header::read(&arguments.file)?);
    print(&if arguments.json {
        json(&report)?
    } else {
        report.text(&arguments.file)
    })
}

/// The memory of a model, in bytes per process.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
struct MemoryEstimate {
    tensors: u64,
    elements: u64,
    dtypes: Vec<Dtype>,
    parameters: u64,
    gradients: u64,
    /// The flat buffers in which several ranks reduce gradients.
    buckets: u64,
    optimizers: Optimizers,
    totals: Totals,
    left_out: [&'static str; 1],
}

#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
struct Dtype {
    dtype: String,
    tensors: u64,
    elements: u64,
    bytes: u64,
    /// True if it can have a gradient.
    trained: bool,
}

/// The state of optimizers: values of each parameter, in its type.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
struct Optimizers {
    sgd: u64,
    sgd_momentum: u64,
    adam: u64,
}

/// Parameters, and for training gradients, buckets and the optimizer's state.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
struct Totals {
    inference: u64,
    sgd: u64,
    sgd_momentum: u64,
    adam: u64,
}

impl MemoryEstimate {
    fn of(tensors: &BTreeMap<String, Tensor>) -> Self {
        let mut dtypes: BTreeMap<&str, Dtype> = BTreeMap::new();
        for tensor in tensors.values() {
            let dtype = dtypes.entry(&tensor.dtype).or_insert_with(|| Dtype {
                dtype: tensor.dtype.clone(),
                trained: is_trained(&tensor.dtype),
                ..Dtype::default()
            });
            dtype.tensors += 1;
            dtype.elements = dtype.elements.saturating_add(tensor.elements);
            dtype.bytes = dtype.bytes.saturating_add(tensor.bytes);
        }
        let mut dtypes: Vec<Dtype> = dtypes.into_values().collect();
        dtypes.sort_by_key(|dtype| std::cmp::Reverse(dtype.bytes));
        let sum = |of: &dyn Fn(&Dtype) -> u64| dtypes.iter().map(of).fold(0, u64::saturating_add);
        let trained = |dtype: &Dtype| if dtype.trained { dtype.bytes } else { 0 };
        let (parameters, gradients) = (sum(&|dtype| dtype.bytes), sum(&trained));
        let buckets = sum(&|dtype| match dtype.dtype.as_str() {
            _ if !dtype.trained => 0,
            "F64" => dtype.bytes,
            // Halves are summed in f32.
            _ => dtype.elements.saturating_mul(4),
        });
        let optimizers = Optimizers {
            sgd: 0,
            sgd_momentum: gradients,
            adam: gradients.saturating_mul(2),
        };
        let training = [parameters, gradients, buckets];
        let total = |optimizer| {
            training
                .iter()
                .fold(optimizer, |a: u64, b| a.saturating_add(*b))
        };
        Self {
            tensors: tensors.len() as u64,
            elements: sum(&|dtype| dtype.elements),
            parameters,
            gradients,
            buckets,
            optimizers,
            totals: Totals {
                inference: parameters,
                sgd: total(optimizers.sgd),
                sgd_momentum: total(optimizers.sgd_momentum),
                adam: total(optimizers.adam),
            },
            left_out: ["activations"],
            dtypes,
        }
    }

    fn text(&self, path: &Path) -> String {
        let mut text = format!(
            "{}: {} tensors, {} elements\n\n",
            path.display(),
            self.tensors,
            self.elements
        );
        let mut rows = vec![["dtype", "tensors", "elements", "size"].map(str::to_owned)];
        rows.extend(self.dtypes.iter().map(|dtype| {
            // Escaped, so that a file cannot control the terminal.
            let name = dtype.dtype.escape_debug();
            let name = match dtype.trained {
                true => name.to_string(),
                false => format!("{name} (not trained)"),
            };
            [
                name,
                dtype.tensors.to_string(),
                dtype.elements.to_string(),
                size(dtype.bytes),
            ]
        }));
        text += &columns(&rows);
        let Optimizers {
            sgd,
            sgd_momentum,
            adam,
        } = self.optimizers;
        let rows = [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("buckets, with several processes", self.buckets),
            ("state of SGD", sgd),
            ("state of SGD with momentum", sgd_momentum),
            ("state of Adam or AdamW", adam),
            ("total, inference", self.totals.inference),
            ("total, training with SGD", self.totals.sgd),
            (
                "total, training with SGD and momentum",
                self.totals.sgd_momentum,
            ),
            ("total, training with Adam or AdamW", self.totals.adam),
        ];
        text += "\nOf each process:\n";
        text += &columns(&rows.map(|(name, bytes)| [name.to_owned(), size(bytes)]));
        text += "\nLeft out: activations, which grow with the batch and depend on the program \
                 (`find_executable_batch_size`\ntries what fits), and what the device keeps for \
                 itself.\n";
        text
    }
}

/// Returns `true` if values of this type have gradients. Running means and the like are floats too; a file does
/// not tell them apart.
fn is_trained(dtype: &str) -> bool {
    dtype.starts_with('F') || dtype.starts_with("BF")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_reduced_in_full_precision_and_integers_not_at_all() {
        let tensor = |dtype: &str, elements, bytes| Tensor {
            bytes,
            dtype: dtype.to_owned(),
            elements,
        };
        let tensors = BTreeMap::from([
            ("a".to_owned(), tensor("BF16", 100, 200)),
            ("b".to_owned(), tensor("F64", 10, 80)),
            ("c".to_owned(), tensor("I64", 3, 24)),
        ]);
        let report = MemoryEstimate::of(&tensors);
        assert_eq!((report.tensors, report.elements), (3, 113));
        assert_eq!((report.parameters, report.gradients), (304, 280));
        assert_eq!(report.buckets, 480);
        assert_eq!(report.optimizers.adam, 560);
        assert_eq!(report.totals.adam, 304 + 280 + 480 + 560);
        assert_eq!(report.totals.inference, 304);
        let dtypes: Vec<_> = report.dtypes.iter().map(|x| x.dtype.as_str()).collect();
        assert_eq!(dtypes, ["BF16", "F64", "I64"]);
    }
}
