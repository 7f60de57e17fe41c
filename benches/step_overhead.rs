//! Compares a prepared loop on one process with the same loop in plain Burn, in pairs of rounds in alternating order.
//!
//! `cargo bench -p accelerator-benches --bench step_overhead -- --help`

use std::error::Error;
use std::fmt;

use accelerator::prelude::*;
use accelerator_benches::{Interval, Model, Output, Pair};
use clap::Parser;
use serde::Serialize;

/// Measure the overhead of a prepared loop over a plain one
#[derive(Debug, Parser)]
struct Args {
    /// The networks
    #[arg(long, value_delimiter = ',', default_value = "cnn,small-mlp")]
    model: Vec<Model>,
    /// The number of pairs of rounds
    #[arg(long, default_value_t = 20)]
    pairs: usize,
    /// The duration of a round, in seconds
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    #[command(flatten)]
    output: Output,
}

/// The result for a network.
#[derive(Debug, Serialize)]
struct Line {
    model: Model,
    /// Milliseconds per step in plain Burn.
    plain: Interval,
    /// Milliseconds per prepared step.
    prepared: Interval,
    /// Prepared over plain, pair by pair.
    ratio: Interval,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let accelerator = Accelerator::builder().device(BackendKind::Flex).build()?;
    for &model in &args.model {
        args.output.print(&measure(&args, &accelerator, model)?)?;
    }
    Ok(accelerator.finish()?)
}

fn measure(args: &Args, accelerator: &Accelerator, model: Model) -> Result<Line, Box<dyn Error>> {
    // The rounds before the first pair are cold; they tell how many steps fit into a round.
    let steps = {
        let mut pair = Pair::new(accelerator, model, 5)?;
        pair.plain()?;
        (args.seconds / pair.plain()?.whole).ceil().max(1.0) as usize
    };
    let mut pair = Pair::new(accelerator, model, steps)?;
    pair.plain()?;
    pair.prepared()?;
    let (mut plain, mut prepared) = (Vec::new(), Vec::new());
    for turn in 0..args.pairs {
        if turn % 2 == 0 {
            plain.push(pair.plain()?.whole * 1e3);
            prepared.push(pair.prepared()?.whole * 1e3);
        } else {
            prepared.push(pair.prepared()?.whole * 1e3);
            plain.push(pair.plain()?.whole * 1e3);
        }
    }
    Ok(Line {
        model,
        ratio: Interval::of_ratios(&prepared, &plain),
        plain: Interval::of(plain),
        prepared: Interval::of(prepared),
    })
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:12} plain {:.3} ms, prepared {:.3} ms, ratio {:.4}",
            self.model.name(),
            self.plain,
            self.prepared,
            self.ratio
        )
    }
}
