# The command that OneFlow-Benchmark's examples/pretrain_345M.sh starts, on one device.
python3 -m oneflow_gpt.training \
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 \
    --micro-batch-size 8 --global-batch-size 8 \
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 \
    --num-gpus-per-node 1 --num-nodes 1 --node-ips 127.0.0.1 \
    --train-iters 500000 --learning-rate 1.5e-4 --min-lr 1.0e-5 \
    --lr-decay-style cosine --lr-decay-iters 320000 --lr-warmup-fraction 0.01 \
    --optimizer adamw --initial-loss-scale 4294967296 --weight-decay 1e-2 --clip-grad 1.0 \
    --dataset /data/gpt/gpt_sample_dataset_text_document --seq-length 1024 --split 949,50,1 \
    --load checkpoint --save checkpoint --save-interval 10000 --log-interval 100 \
    --metric-print-format table \
    --checkpoint-activations --multihead-attention-fusion --fp16 --use-rdma
