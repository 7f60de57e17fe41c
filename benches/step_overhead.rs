//! A prepared loop on one process beside the same loop in plain Burn, in pairs of rounds whose order
//! alternates.
//!
//! `cargo bench -p accelerator-benches --bench step_overhead -- --help`

#![allow(clippy::print_stdout, reason = "a bench prints its figures")]

use std::error::Error;

use accelerator::prelude::*;
use accelerator_benches::{Interval, Model, Pair};
use clap::Parser;
use serde::Serialize;

/// Measures what a prepared loop takes more than a plain one.
#[derive(Debug, Parser)]
struct Args {
    /// The networks
    #[arg(long, value_delimiter = ',', default_value = "cnn,small-mlp")]
    model: Vec<Model>,
    /// Pairs of rounds
    #[arg(long, default_value_t = 20)]
    pairs: usize,
    /// How long a round takes, in seconds
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Prints one JSON object a line
    #[arg(long)]
    json: bool,
    #[arg(long, hide = true)]
    bench: bool,
}

/// What came out for a network.
#[derive(Debug, Serialize)]
struct Line {
    model: Model,
    /// Milliseconds of a step in plain Burn.
    plain: Interval,
    /// Milliseconds of a prepared step.
    prepared: Interval,
    /// Prepared over plain, pair by pair.
    ratio: Interval,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let accelerator = Accelerator::builder().device(BackendKind::Flex).build()?;
    for &model in &args.model {
        let line = measure(&args, &accelerator, model)?;
        if args.json {
            println!("{}", serde_json::to_string(&line)?);
        } else {
            println!(
                "{:12} plain {:.3} ms, prepared {:.3} ms, ratio {:.4}",
                model.name(),
                line.plain,
                line.prepared,
                line.ratio
            );
        }
    }
    Ok(accelerator.finish()?)
}

fn measure(args: &Args, accelerator: &Accelerator, model: Model) -> Result<Line, Box<dyn Error>> {
    // The rounds before the first pair find everything cold, and tell how many steps fit.
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
    let ratios = prepared.iter().zip(&plain).map(|(a, b)| a / b);
    Ok(Line {
        model,
        ratio: Interval::of(ratios.collect()),
        plain: Interval::of(plain),
        prepared: Interval::of(prepared),
    })
}
