//! Tests batches and a model in double precision, in a process of their own: it can set the dtype of a device only
//! once.

use accelerator_examples::{CnnConfig, DigitBatcher, Digits, MnistArgs, Score, cross_entropy};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::tensor::DType;
use clap::Parser;

#[test]
fn everything_computes_in_the_dtype_that_was_asked_for() {
    let args = MnistArgs::parse_from(["mnist", "--dtype", "f64"]);
    let device = args.open_device().unwrap();
    let digits = Digits::draw(4, 1);
    let items = (0..4).map(|index| digits.get(index).unwrap()).collect();
    let batch = DigitBatcher.batch(items, &device);
    assert_eq!(batch.images.dtype(), DType::F64);

    let model = CnnConfig::new().init(&device);
    let logits = model.forward(batch.images);
    assert_eq!(logits.dtype(), DType::F64);
    let mut score = Score::new();
    score.update(logits.clone(), batch.targets.clone(), 4);
    let loss = cross_entropy(logits, batch.targets);
    assert_eq!(loss.dtype(), DType::F64);
    assert_eq!(loss.into_scalar::<f64>(), score.loss());

    // A second call cannot change the dtype.
    let error = MnistArgs::parse_from(["mnist"]).open_device().unwrap_err();
    assert!(error.is_device(), "{error:?}");
}
