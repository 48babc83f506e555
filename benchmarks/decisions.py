"""How good batch and optimizer are that a plan takes, where it knows how the network learns.

The truth is a grid of whole trainings. For each task, each of two lengths, each batch of 32, 64,
... 2,048 that leaves 4 steps an epoch, SGD and Muon, there is a training with the learning rate
that a plan gives without trials, with a third of it and with three times it; where the best of
them with seed 0 is at an end, with one rate more beyond, until the best is no end or is 27 times or
a 27th of the plan's. Seeds 0 to 2. One worker in one process on one core, bfloat16 where the
processor computes in it, all else as a job leaves it (a cosine, roots of batches in the rates, no
micro-batches, usual augmentation):

    digits                resnet8,          8 px, 1,437 images,  3 and 12 epochs, batch  32 to   256
    cifar-resnet8         resnet8,         16 px, 8,192 images,  3 and 12 epochs, batch  32 to 2,048
    cifar-vgg8            vgg8,            16 px, 8,192 images,  3 and 12 epochs, batch  32 to 2,048
    groups-resnet8        resnet8,         16 px, 8,192 images,  3 and 12 epochs, batch  32 to 2,048
    imagenette-resnet8    resnet8,         64 px, 2,048 images,  2 and  8 epochs, batch  32 to   512
    imagenette-mobilenet  mobilenet_small, 32 px, 2,048 images,  2 and  8 epochs, batch  32 to   512

The CIFAR tasks are CIFAR-100's 100 classes, and as groups the first ten of its superclasses in the
order of its coarse labels, five classes each: aquatic mammals, fish, flowers, food containers,
fruit and vegetables, household electrical devices, household furniture, insects, large carnivores,
large man-made outdoor things; all at half their side. imagenette2-160 is ten classes of ImageNet.
Half a side and 32 px for mobilenet_small are for the sake of time: a training takes about a
minute at most, and there are more than 1,200. Training images are drawn evenly over the originals;
the accuracy is that of all test images after the last epoch. Test images serve this score alone.

A prior of the model of learning may be tuned on another set, the look set: the same tasks with seed
10, other training images (drawn evenly over those that are left), and an accuracy over images held
out from the training set (2,000 of CIFAR, 1,000 of Imagenette). Batches 32, 128, 512 and 2,048, SGD
and Muon at the rate of a plan, and three lengths: a 16th, a 4th and all of the samples of the
longer training, less than an epoch being an epoch of fewer images. The 1,437 digits leave no
others: their look set has 1,152 of them, 285 are held out, and 256 is the largest batch.

    python -m benchmarks.decisions_runs look|truth [--data DIR] [--limit-minutes M]

makes the runs that are missing, and adds a line for each to benchmarks/results/decisions-runs.jsonl
or benchmarks/results/learning-curves.jsonl. The order is: seed 0 at the plan's rate, seed 0 at the
others, seed 0 beyond the ends, seed 1, seed 2.

What is scored are plans of each task for each of its lengths, a case each: from a profile of the
task with trials, `goal.objective=auto`; from the same profile without them, `goal.objective=knee`.
One profile serves both lengths. `goal.least_steps` is 4. A candidate is a batch of the grid with
SGD or Muon. Its time is that which the plan predicts, the trials aside. Its accuracy is the mean
over the seeds at the best of its rates. The accuracy of the chosen one is that at the rate
which it was given: between two of the grid's it is on the straight line over the logarithm of the
rate, beyond them it is that of the nearest; and where the chosen batch is between two of the grid,
likewise over the logarithm of the batch. A training that gave up counts as guessing.

What is best among many noisy means looks better than it is. So wherever something is called best,
candidate or rate, the choice is made by the other seeds: for each seed, that which is best by the
mean of the others is taken and what it reached with this one counts; the mean over the seeds is
the accuracy. With a single seed so far, it chooses itself.

    regret_points           accuracy of the best candidate that takes at most 1.1 times as long as
                            the chosen one, less that of the chosen one; mean over the cases at
                            most 1
    worst_regret_points     the largest of them; at most 3
    regret_points_knee      the same mean for the rule without trials
    time_regret             time of the chosen one over the least among the candidates that are at
                            most a point less accurate than it, itself among them; mean at most 1.15
    accuracy_error_points   |predicted - measured| of all candidates whose accuracy the plans of
                            all cases predict, measured at the rate of a plan; median at most 2
    accuracy_coverage       share of them that lie within the predicted interval; at least 0.9
    accuracy_half_width_points
                            half the predicted interval; median
    trials_share            time of the trials over the predicted time of the chosen training; mean
                            over the longer trainings at most 0.1

Spread is the range for means and the quartiles for medians. All are in points of accuracy
(hundredths of a share) but for the time regret, which is a ratio, and the shares. A case counts
when seed 0 of its grid is whole.
"""
