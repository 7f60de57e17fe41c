//! Metrics that count padding.

use super::{log_of, logged};
use crate::common::{Column, ColumnBatcher, columns, distance, line, loader};
use accelerator::data::Batch;
use accelerator::metric::Sum;
use accelerator::prelude::*;
use burn::nn::Linear;

type Read = fn(&PreparedLoader<Column>, &Linear) -> Result<()>;

type Count = fn(&Accelerator, &mut Linear, &Batch<Column>) -> Result<usize>;

/// Returns the count of each rank over two epochs of five samples, and its log until the count is reduced.
fn counted(
    tail: TailPolicy,
    count: fn(&Accelerator, &mut Linear, &Batch<Column>) -> Result<usize>,
) -> Vec<(f64, String)> {
    let counts = accelerator::launch(2, |accelerator| {
        let mut model = accelerator.prepare(line(&accelerator.device()))?;
        let valid = LoaderBuilder::new(ColumnBatcher)
            .batch_size(2)
            .tail(tail)
            .build(columns(5));
        let valid = accelerator.prepare(valid)?;
        let (total, text) = logged(|| -> Result<f64> {
            let mut total = 0.0;
            for epoch in 0..2 {
                let mut sum = Sum::new();
                for batch in valid.epoch(epoch) {
                    sum.count(count(&accelerator, &mut model, &batch?)?);
                }
                total += accelerator.reduce_metric(sum)?.value();
            }
            Ok(total)
        });
        Ok((total?, text))
    });
    counts.unwrap()
}

#[test]
fn rows_of_padding_that_go_into_a_metric_are_told_once() {
    // Rank 1 has no samples left in the last step. Padding gives it some.
    for (tail, told) in [
        (TailPolicy::Exact, "an idle batch"),
        (TailPolicy::Pad, "samples that others have"),
    ] {
        let rows: [Count; 3] = [
            |_, _, batch| Ok(batch.values.dims()[0]),
            |_, _, batch| Ok(batch.num_samples()),
            |_, _, batch| Ok(batch.indices().len()),
        ];
        for count in rows {
            let ranks = counted(tail, count);
            let padded = ranks.iter().filter(|(_, text)| !text.is_empty());
            assert_eq!(padded.count(), if told.contains("idle") { 1 } else { 2 });
            let (total, text) = &ranks[1];
            assert!(*total > 10.0, "rows of padding are there");
            assert_eq!(text.matches(told).count(), 1, "{text}");
            assert!(text.contains("`batch.real()`"), "{text}");
        }
        let known: [Count; 3] = [
            |_, _, batch| Ok(batch.real()),
            |_, _, batch| match batch.is_idle() {
                true => Ok(0),
                false => Ok(batch.values.dims()[0] - (batch.num_samples() - batch.real())),
            },
            |_, _, batch| Ok(batch.real_indices().len()),
        ];
        for count in known {
            for (total, text) in counted(tail, count) {
                assert_eq!((total, text.as_str()), (10.0, ""));
            }
        }
        // In training, the argument of `backward` tells the weight.
        let trained = counted(tail, |accelerator, model, batch| {
            let gradients = accelerator.backward(distance(model, batch), model, batch)?;
            drop(gradients);
            Ok(0)
        });
        assert!(
            trained.iter().all(|(_, text)| text.is_empty()),
            "{trained:?}"
        );
    }
}

#[test]
fn padding_of_which_nothing_is_counted_is_not_warned_of() {
    let reads: [Read; 6] = [
        |valid, _| {
            assert_eq!(valid.epoch(0).count(), 3);
            Ok(())
        },
        |valid, _| {
            let last = valid.epoch(0).last().unwrap()?;
            assert_eq!(last.step(), 2);
            Ok(())
        },
        // A warm-up does not count.
        |valid, model| {
            for batch in valid.epoch(0) {
                model.forward(batch?.values.clone());
            }
            Ok(())
        },
        |valid, _| {
            for batch in valid.epoch(0) {
                if batch?.is_last() {
                    break;
                }
            }
            Ok(())
        },
        // It returns from within the loop, as an error does.
        |valid, model| {
            for batch in valid.epoch(0) {
                let batch = batch?;
                model.forward(batch.values.clone());
                if batch.is_last() {
                    return Ok(());
                }
            }
            Ok(())
        },
        |valid, _| {
            for batch in valid.epoch(0) {
                assert!(batch?.num_samples() <= 2);
            }
            Ok(())
        },
    ];
    for (number, read) in reads.into_iter().enumerate() {
        let texts = accelerator::launch(3, |accelerator| {
            let model = line(&accelerator.device());
            let valid = accelerator.prepare(loader(13, 2))?;
            log_of(|| {
                read(&valid, &model)?;
                // A count that follows is correct.
                let mut sum = Sum::new();
                for batch in valid.epoch(1) {
                    sum.count(batch?.real());
                }
                assert_eq!(accelerator.reduce_metric(sum)?.value(), 13.0);
                accelerator.finish()
            })
        });
        assert_eq!(texts.unwrap(), [""; 3], "read {number}");
    }
}
