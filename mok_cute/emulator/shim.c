// The half of the DSL's runtime library that talks to CUDA, for the virtual GPU.
//
// Host code compiled by the DSL calls functions of the vendor's library by name. redirect.py makes it call those here
// that have the same name after "virtual_", and the vendor's library answers all others. Signatures are those that the
// compiled host code declares; structures are those of the public CUDA runtime. Python supplies the callbacks.

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NUM_ATTRIBUTES = 256 };

typedef struct { uint32_t id, padding, value[16]; } launch_attribute;
typedef struct {
    uint32_t grid[3], block[3];
    uint64_t dynamic_smem_bytes;
    void *stream;
    launch_attribute *attributes;
    uint32_t num_attributes;
} launch_config;

typedef struct {
    int (*load)(void *library, const void *image, uint64_t num_bytes);
    int (*launch)(void *library, const char *entry, const launch_config *config, void **params);
    int (*allocate)(void **address, uint64_t num_bytes);
    int (*release)(void *address);
    int (*synchronize)(void);                             // before the host touches device memory
    int (*written)(void *address, uint64_t num_bytes);    // the host has written these bytes
} callbacks;

typedef struct { void *library; char entry[]; } kernel;

static callbacks on;
static int32_t device_attributes[NUM_ATTRIBUTES];
static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;

void emulator_set_callbacks(const callbacks *given) { on = *given; }
void emulator_set_device_attribute(int id, int value) { device_attributes[id & (NUM_ATTRIBUTES - 1)] = value; }

// A fat binary states its size; what it wraps is an ELF image. Anything else is not made by the DSL.
static uint64_t image_bytes(const void *image)
{
    uint32_t magic;
    uint16_t header;
    uint64_t payload;
    memcpy(&magic, image, 4);
    if (magic != 0xBA55ED50u)
        return 0;
    memcpy(&header, (const char *)image + 6, 2);
    memcpy(&payload, (const char *)image + 8, 8);
    return header + payload;
}

int virtual_cudaLibraryLoadData(void **library, const void *image, void *options, void *option_values, unsigned num_options,
                         void *library_options, void *library_option_values, unsigned num_library_options)
{
    (void)options, (void)option_values, (void)num_options;
    (void)library_options, (void)library_option_values, (void)num_library_options;
    *library = malloc(1);  // an address that is nobody else's
    return on.load(*library, image, image_bytes(image));
}

int virtual_cudaLibraryUnload(void *library) { return (void)library, SUCCESS; }  // its address stays taken

int virtual_cudaLibraryGetKernel(void **result, void *library, const char *entry)
{
    size_t length = strlen(entry) + 1;
    kernel *made = malloc(sizeof *made + length);  // lives as long as the process: the DSL never returns one
    made->library = library;
    memcpy(made->entry, entry, length);
    *result = made;
    return SUCCESS;
}

int virtual_cudaDeviceGetAttribute(int *value, int id, int device)
{
    (void)device;
    if (id < 0 || id >= NUM_ATTRIBUTES)
        return INVALID_VALUE;
    *value = device_attributes[id];
    return SUCCESS;
}

// Static shared memory is counted by the device when it lays out the kernel.
int virtual_cuKernelGetAttribute(int *value, int id, void *of, int device)
{
    (void)id, (void)of, (void)device;
    *value = 0;
    return SUCCESS;
}

// Limits that a kernel raises for itself: the launch is checked against the device's limit.
int virtual_cudaFuncSetAttribute(void *of, int id, int value) { return (void)of, (void)id, (void)value, SUCCESS; }
int virtual_cudaKernelSetAttributeForDevice(void *of, int id, int value, int device)
{
    return (void)of, (void)id, (void)value, (void)device, SUCCESS;
}

int virtual_cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *of, int threads, size_t smem_bytes)
{
    (void)of, (void)threads, (void)smem_bytes;
    *blocks = 1;
    return SUCCESS;
}

int virtual_cudaGetDevice(int *device) { return *device = 0, SUCCESS; }
int virtual_cudaGetDeviceCount(int *count) { return *count = 1, SUCCESS; }
int virtual_cudaSetDevice(int device) { return device ? INVALID_VALUE : SUCCESS; }
int virtual_cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal ? INVALID_VALUE : SUCCESS; }

int virtual_cudaLaunchKernelEx(const launch_config *config, void *of, void **params)
{
    kernel *launched = of;
    return on.launch(launched->library, launched->entry, config, params);
}

int virtual_cudaLaunchKernel(void *of, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z, uint32_t block_x, uint32_t block_y,
                      uint32_t block_z, void **params, size_t dynamic_smem_bytes, void *stream)
{
    launch_config config = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, dynamic_smem_bytes, stream, NULL, 0};
    return virtual_cudaLaunchKernelEx(&config, of, params);
}

int virtual_cudaDeviceSynchronize(void) { return on.synchronize(); }
int virtual_cudaStreamSynchronize(void *stream) { return (void)stream, on.synchronize(); }

int virtual_cudaMalloc(void **address, size_t num_bytes) { return on.allocate(address, num_bytes); }
int virtual_cudaMallocAsync(void **address, size_t num_bytes, void *stream) { return (void)stream, virtual_cudaMalloc(address, num_bytes); }
int virtual_cudaFree(void *address)
{
    int error = on.synchronize();
    return error ? error : on.release(address);
}
int virtual_cudaFreeAsync(void *address, void *stream) { return (void)stream, virtual_cudaFree(address); }

int virtual_cudaMemcpy(void *to, const void *from, size_t num_bytes, int kind)
{
    (void)kind;
    int error = on.synchronize();
    if (error)
        return error;
    memmove(to, from, num_bytes);
    return on.written(to, num_bytes);
}
int virtual_cudaMemcpyAsync(void *to, const void *from, size_t num_bytes, int kind, void *stream)
{
    return (void)stream, virtual_cudaMemcpy(to, from, num_bytes, kind);
}

int virtual_cudaMemset(void *to, int value, size_t num_bytes)
{
    int error = on.synchronize();
    if (error)
        return error;
    memset(to, value, num_bytes);
    return on.written(to, num_bytes);
}
int virtual_cudaMemsetAsync(void *to, int value, size_t num_bytes, void *stream)
{
    return (void)stream, virtual_cudaMemset(to, value, num_bytes);
}

// TVM-FFI functions load their library on the first call, through these two.
int virtual_cuda_dialect_init_library_once(void **library, int (*init)(void **), int (*load_to_device)(void **, int),
                                   void (*set_error)(const char *kind, const char *message))
{
    int error = SUCCESS;
    pthread_mutex_lock(&once);
    if (!*library) {
        error = init(library);
        if (!error)
            error = load_to_device(library, 0);
        if (error) {
            *library = NULL;
            set_error("RuntimeError", "the virtual GPU refused the kernels of this function");
        }
    }
    pthread_mutex_unlock(&once);
    return error;
}

void virtual_cuda_dialect_unload_library_once(void **library) { *library = NULL; }
