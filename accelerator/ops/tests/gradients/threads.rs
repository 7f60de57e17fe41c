//! Results are bit-identical on any number of threads.

use accelerator_ops::{self as ops, AttentionOptions, nn};
use burn::tensor::ops::{AvgPoolOptions, ConvOptions, MaxPoolOptions};
use burn::tensor::{DType, Tensor, TensorData};

use super::lstm::{leaves_of_lstm, states_of_lstm};
use super::{drawing, numbers, run};

#[test]
fn results_have_the_same_bits_on_any_number_of_threads() {
    let _drawing = drawing();
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(|| {
            let convolution = run(
                &[
                    numbers(&[9, 8, 40, 40], 1),
                    numbers(&[16, 8, 3, 3], 2),
                    numbers(&[16], 3),
                ],
                DType::F32,
                |leaves| {
                    let options = ConvOptions::new([1, 1], [1, 1], [1, 1], 1);
                    let y =
                        ops::conv2d_relu(leaves.at(0), leaves.at(1), Some(leaves.at(2)), options);
                    ops::max_pool2d(y, MaxPoolOptions::new([2, 2]))
                },
            );
            let attention = run(
                &[7, 8, 9].map(|seed| numbers(&[6, 150, 96], seed)),
                DType::F32,
                |leaves| {
                    let options = AttentionOptions::new(4);
                    ops::attention(leaves.at(0), leaves.at(1), leaves.at(2), options)
                },
            );
            let norm = run(
                &[numbers(&[800, 96], 4), numbers(&[96], 5), numbers(&[96], 6)],
                DType::F32,
                |leaves| {
                    let y =
                        ops::layer_norm(leaves.at::<2>(0), leaves.at(1), Some(leaves.at(2)), 1e-5);
                    ops::gelu(y)
                },
            );
            let linear = run(
                &[
                    numbers(&[700, 130], 7),
                    numbers(&[130, 90], 8),
                    numbers(&[90], 9),
                ],
                DType::F32,
                |leaves| {
                    let y = ops::linear(leaves.at::<2>(0), leaves.at(1), Some(leaves.at(2)));
                    ops::rms_norm(y, leaves.at(2), 1e-5)
                },
            );
            let dropped = run(&[numbers(&[900, 130], 7)], DType::F32, |leaves| {
                leaves.at::<2>(0).device().seed(5);
                ops::dropout(leaves.at::<2>(0), 0.3)
            });
            let loss = run(&[numbers(&[300, 500], 7)], DType::F32, |leaves| {
                let targets = (0..300).collect::<Vec<i64>>();
                let targets = TensorData::new(targets, [300]);
                let device = leaves.at::<2>(0).device();
                ops::cross_entropy(leaves.at(0), Tensor::from_data(targets, &device))
            });
            let lstm = run(
                &leaves_of_lstm([70, 9, 30, 50], true, 3),
                DType::F32,
                |leaves| {
                    states_of_lstm(leaves, true, |layer, x, state| {
                        nn::Lstm::from(layer).forward(x, state)
                    })
                },
            );
            let small = run(
                &[
                    numbers(&[90, 8, 6, 6], 1),
                    numbers(&[16, 8, 3, 3], 2),
                    numbers(&[16], 3),
                    numbers(&[16], 4),
                ],
                DType::F32,
                |leaves| {
                    let options = ConvOptions::new([1, 1], [1, 1], [1, 1], 1);
                    let y = ops::conv2d(leaves.at(0), leaves.at(1), None, options);
                    ops::batch_norm_train(y, leaves.at(2), leaves.at(3), 1e-5).output
                },
            );
            let embedded = run(&[numbers(&[90, 700], 1)], DType::F32, |leaves| {
                let indices = (0..400).map(|at| at * at % 89).collect::<Vec<i64>>();
                let indices = TensorData::new(indices, [4, 100]);
                let device = leaves.at::<2>(0).device();
                ops::embedding(leaves.at(0), Tensor::from_data(indices, &device))
            });
            let means = run(&[numbers(&[29, 8, 40, 40], 1)], DType::F32, |leaves| {
                ops::avg_pool2d(leaves.at(0), AvgPoolOptions::new([3, 2]))
            });
            [
                embedded,
                means,
                convolution,
                attention,
                norm,
                linear,
                dropped,
                loss,
                lstm,
                small,
            ]
            .concat()
        })
    };
    let one = run(1);
    assert_eq!(run(2), one);
    assert_eq!(run(7), one);
}
