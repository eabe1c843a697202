# The command that OneFlow-Benchmark's script of this name starts on each of 4 machines.
python3 -m oneflow_gpt.training \
    --num-layers 24 --hidden-size 2304 --num-attention-heads 24 --seq-length 2048 \
    --micro-batch-size 8 --global-batch-size 512 \
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 \
    --num-gpus-per-node 8 --num-nodes 4 --node-ips 10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4 \
    --train-iters 500000 --learning-rate 1.5e-4 --min-lr 1.0e-5 \
    --lr-decay-style cosine --lr-decay-iters 320000 --lr-warmup-fraction 0.01 \
    --optimizer adamw --initial-loss-scale 4294967296 --weight-decay 1e-2 --clip-grad 1.0 \
    --dataset /data/gpt/gpt_sample_dataset_text_document --split 949,50,1 \
    --load checkpoint --save checkpoint --save-interval 10000 --log-interval 100 \
    --metric-print-format table \
    --checkpoint-activations --multihead-attention-fusion --fp16
